"""Chat templates: transformers' dialect, the model's own words, and nothing a template may do to the server."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from legato.errors import ModelCorrupt, ModelNotFound, RequestError
from legato.exec.weights.gguf import read_metadata
from legato.models.chat_template import (
    ChatTemplate,
    no_template,
    template_from_file,
    template_from_folder,
    template_from_gguf,
)

USER = [{"role": "user", "content": "Hi <b>"}]


def render(template: str, messages: list[dict[str, Any]] = USER, **options: Any) -> str:
    return ChatTemplate(template, bos_token="<s>", eos_token="</s>").render(messages, **options)


def test_smollm2_writes_its_conversation(smollm2_path: Path) -> None:
    text = template_from_gguf(read_metadata(smollm2_path), "smollm2")
    assert text is not None
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Why?"},
    ]
    assert ChatTemplate(text).render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate(text).render(messages[:2], add_generation_prompt=False).endswith("2+2?<|im_end|>\n")


def test_a_base_model_has_no_template_and_says_what_to_do(gemma3_path: Path) -> None:
    assert template_from_gguf(read_metadata(gemma3_path), "gemma3") is None
    assert "--chat-template FILE" in str(no_template("gemma3-270m"))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hi <b></s>"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi <b>"}]'),
        ("{{ {'é': 1} | tojson(indent=1) }}", '{\n "é": 1\n}'),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% generation %}a{{ 1 }}{% endgeneration %}b", "a1b"),
        ("{{ tools is none }}{{ add_generation_prompt }}", "TrueTrue"),
        ("{{ missing is defined }}{{ missing }}", "False"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{{ thinking }}", "yes"),
    ],
)
def test_transformers_dialect(template: str, expected: str) -> None:
    assert render(template, thinking="yes") == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ missing.field.deeper }}", "undefined"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ 'a' * 99999999 }}", "over 16,777,216 elements"),
        ("{{ 99999999 * [1] }}", "over 16,777,216 elements"),
        ("{{ 2 ** 99999 }}", "over 4096 bits"),
        ("{% for i in range(10000000) %}x{% endfor %}", "Range too big"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "over 16,777,216 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages[7].content }}", "no element 7|undefined"),
    ],
)
def test_a_template_that_refuses_or_fails_is_a_request_error(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render(template)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("template", ["{% if %}", "{{", "{% unknown %}", "{{ x | nosuchfilter }}", "{% for %}" * 3])
def test_a_template_that_cannot_be_compiled_is_corrupt(template: str) -> None:
    with pytest.raises(ModelCorrupt, match="chat template"):
        ChatTemplate(template)


def test_a_folder_has_its_template_in_one_of_three_places(tmp_path: Path) -> None:
    assert template_from_folder(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text("{}")
    assert template_from_folder(tmp_path) is None
    config.write_text(json.dumps({"chat_template": "one"}))
    assert template_from_folder(tmp_path) == "one"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "two"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert template_from_folder(tmp_path) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert template_from_folder(tmp_path) == "three"


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"none\.jinja"):
        template_from_file(tmp_path / "none.jinja")
    (tmp_path / "bad.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelCorrupt, match="not UTF-8"):
        template_from_file(tmp_path / "bad.jinja")
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelCorrupt, match="cannot be read"):
        template_from_folder(tmp_path)
    with pytest.raises(ModelCorrupt, match="no string"):
        template_from_gguf({"tokenizer.chat_template": 3}, "x")
