"""Tokenizers of the real models and of tiny ones: round trips, special tokens, bytes, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.errors import ModelCorrupt, ModelError, ModelNotFound, ModelUnsupported, RequestError
from legato.exec.weights.gguf import read_metadata
from legato.models.byte_level import PRE_TOKENIZERS, byte_alphabet
from legato.models.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf

# Bytes its vocabulary has no token for: some control characters, leads of unassigned planes, what UTF-8 never uses.
SMOLLM2_LACKS = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}

TEXTS = [
    "Hello, world!",
    "  leading, trailing  ",
    "def f(x):\n\treturn x ** 2  # ok\r\n",
    "Grüße, ñandú, naïve café",
    "Привет, как дела?",
    "你好，世界。今天天气怎么样？",
    "こんにちは、世界",
    "안녕하세요 세계",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 🤗 🏳️‍🌈",
    "1234567890 3.14159 1e-10",
    "\x00\x01\x7f\u200b\ufeff",
    "a\n\n\n\nb\t\t\tc     d",
]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return tokenizer_from_gguf(read_metadata(smollm2_path), "smollm2")


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> Tokenizer:
    return tokenizer_from_gguf(read_metadata(gemma3_path), "gemma3")


@pytest.fixture(params=["smollm2", "gemma3"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives_a_round_trip_in_any_tokenizer(smollm2: Tokenizer, gemma3: Tokenizer, text: str) -> None:
    if SMOLLM2_LACKS.isdisjoint(text.encode()):
        assert smollm2.decode(smollm2.encode(text)) == text
    if "▁" not in text:  # SentencePiece's space: it comes back as one
        assert gemma3.decode(gemma3.encode(text)) == text


def test_known_ids_of_smollm2(smollm2: Tokenizer) -> None:
    assert smollm2.encode("Hello world 42") == [19556, 905, 216, 36, 34]
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_ids == {0, 2} and smollm2.bos_id == 1 and not smollm2.add_bos


def test_known_ids_of_gemma3(gemma3: Tokenizer) -> None:
    assert gemma3.encode("Hello world!\n\n") == [2, 9259, 1902, 236888, 108]
    assert gemma3.encode("Hello", add_special=False) == [9259]
    assert gemma3.eos_ids == {1, 106} and gemma3.bos_id == 2 and gemma3.add_bos


def test_a_bos_that_the_text_has_is_not_doubled(gemma3: Tokenizer) -> None:
    assert gemma3.encode("<bos>Hello", parse_special=True) == [2, 9259]


@pytest.mark.parametrize(("name", "marker"), [("smollm2", "<|im_end|>"), ("gemma3", "<end_of_turn>")])
def test_the_text_of_a_special_token_is_text_unless_asked(
    name: str, marker: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    text = f"one {marker} two"
    parsed = tokenizer.encode(text, parse_special=True)
    plain = tokenizer.encode(text, add_special=False)
    assert tokenizer.id_of(marker) in parsed
    assert tokenizer.special_ids.isdisjoint(plain)
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(parsed) == "one  two"
    assert tokenizer.decode(parsed, skip_special=False).endswith(text)


def test_user_defined_tokens_are_found_always(gemma3: Tokenizer) -> None:
    assert len(gemma3.encode("\n" * 20, add_special=False)) == 1
    assert len(gemma3.encode("<h1>", add_special=False)) == 1


def test_every_token_has_its_bytes_and_special_ones_none(tokenizer: Tokenizer, smollm2: Tokenizer) -> None:
    table = tokenizer.bytes_table(tokenizer.vocab_size + 5)
    assert len(table) == tokenizer.vocab_size + 5 and table[-1] == b""
    assert all(not table[number] for number in tokenizer.special_ids)
    single = {piece[0] for piece in table if len(piece) == 1}
    assert single == set(range(256)) - (SMOLLM2_LACKS if tokenizer is smollm2 else set())
    assert tokenizer.token_name(tokenizer.vocab_size) == f"<unused {tokenizer.vocab_size}>"


def test_half_a_character_is_named_by_its_bytes(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("🏳")
    assert len(ids) > 1
    assert any(smollm2.token_name(number).startswith("\\x") for number in ids)


def test_a_lone_surrogate_is_a_request_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")


def test_a_long_word_takes_no_quadratic_time(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("天地玄黄" * 20_000)) == "天地玄黄" * 20_000


# ---- the same from a folder -----------------------------------------------------------------------------------------


def write_folder(folder: Path, tokenizer: Tokenizer, **config: Any) -> None:
    tokenizer._encoder._fast.save(str(folder / "tokenizer.json"))  # type: ignore[attr-defined]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_folder_gives_the_same_tokens_as_the_file(smollm2: Tokenizer, tmp_path: Path) -> None:
    write_folder(tmp_path, smollm2, bos_token="<|im_start|>", eos_token={"content": "<|im_end|>"})
    folder = tokenizer_from_folder(tmp_path)
    for text in [*TEXTS, "a <|im_end|> b"]:
        for parse in (True, False):
            assert folder.encode(text, parse_special=parse) == smollm2.encode(text, parse_special=parse)
    assert (folder.bos_id, folder.eos_id, folder.eos_ids) == (1, 2, {0, 2})
    assert folder.bytes_table(49152) == smollm2.bytes_table(49152)
    assert not folder.add_bos


def test_a_folder_s_post_processor_and_generation_config_are_heard(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "<0x0A>": 3, "▁": 4, "a": 5, "▁a": 6, "<stop>": 7}
    fast = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    fast.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    fast.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    fast.add_special_tokens(["<unk>", "<s>", "</s>", "<stop>"])
    fast.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7, 999]}))
    folder = tokenizer_from_folder(tmp_path)
    assert folder.encode("a a\n") == [1, 6, 6, 3]
    assert folder.decode([1, 6, 6, 3]) == "a a\n"
    assert folder.token_bytes(3) == b"\n" and folder.token_bytes(6) == b" a"
    assert folder.add_bos and folder.eos_ids == {2, 7}


def test_a_folder_without_or_with_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no tokenizer\.json"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelCorrupt, match="cannot be read"):
        tokenizer_from_folder(tmp_path)


# ---- GGUF metadata --------------------------------------------------------------------------------------------------


def byte_level(pre: str | None = None, **changes: Any) -> dict[str, Any]:
    tokens = [*byte_alphabet(), "in", "Ġin", "'S", "<|end|>", "<tag>"]
    keys = {
        "model": "gpt2",
        "tokens": tokens,
        "merges": ["i n", "Ġ in", "' S"],
        "token_type": [1] * 259 + [3, 4],
        "eos_token_id": 259,
        "pre": pre,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 2024 in", ["it", "'s", "Ġ2024", "Ġin"]),
        (None, "it's 2024 in", ["it", "'s", "Ġ2024", "Ġin"]),
        ("smollm", "it's 2024 in", ["it", "'s", "Ġ", "2", "0", "2", "4", "Ġin"]),
        ("llama-bpe", "IT'S 20244\n\n in", ["IT", "'S", "Ġ", "202", "44", "ĊĊ", "Ġin"]),
        ("qwen2", "IT'S 24\n\n in", ["IT", "'S", "Ġ", "2", "4", "ĊĊ", "Ġin"]),
        ("tekken", "camelCase 24/\n in", ["camel", "Case", "Ġ", "2", "4", "/Ċ", "Ġin"]),
    ],
)
def test_each_pre_tokenizer_cuts_words_as_its_models_do(pre: str | None, text: str, words: list[str]) -> None:
    tokenizer = tokenizer_from_gguf(byte_level(pre), "x")
    steps = tokenizer._encoder._fast.pre_tokenizer  # type: ignore[attr-defined]
    assert [word for word, _ in steps.pre_tokenize_str(text)] == words
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_qwen2_composes_characters() -> None:
    assert tokenizer_from_gguf(byte_level("qwen2"), "x").encode("e\u0301") == tokenizer_from_gguf(
        byte_level("qwen2"), "x"
    ).encode("é")


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", True), ("qwen2", False)])
def test_bos_follows_the_pre_tokenizer_unless_the_file_says(pre: str, expected: bool) -> None:
    assert tokenizer_from_gguf(byte_level(pre, bos_token_id=259), "x").add_bos is expected
    told = tokenizer_from_gguf(byte_level(pre, bos_token_id=259, add_bos_token=not expected), "x")
    assert told.add_bos is not expected


def test_the_end_of_a_turn_is_special_even_where_the_file_forgot_it() -> None:
    keys = byte_level()
    keys["tokenizer.ggml.token_type"] = [1] * 261
    tokenizer = tokenizer_from_gguf(keys | {"tokenizer.ggml.eos_token_id": 0}, "x")
    assert tokenizer.eos_ids == {0, 259} and tokenizer.special_ids == {259}
    assert tokenizer.encode("in<|end|>", parse_special=True)[-1] == 259
    assert 259 not in tokenizer.encode("in<|end|>")


def test_an_eos_is_added_where_the_file_says() -> None:
    assert tokenizer_from_gguf(byte_level(add_eos_token=True), "x").encode("in")[-1] == 259


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "bert"}, ModelUnsupported, "tokenizer 'bert'.*gpt2, llama"),
        ({"model": None}, ModelUnsupported, "tokenizer 'None'"),
        ({"pre": "chameleon"}, ModelUnsupported, "'chameleon'.*" + ", ".join(PRE_TOKENIZERS)),
        ({"tokens": None}, ModelCorrupt, "tokens is missing"),
        ({"tokens": [1, 2]}, ModelCorrupt, "tokens"),
        ({"token_type": [1]}, ModelCorrupt, "token_type does not hold 261"),
        ({"merges": None}, ModelCorrupt, "merges is missing"),
        ({"merges": ["abc"]}, ModelCorrupt, "no pair"),
        ({"merges": ["a nothere"]}, ModelCorrupt, "do not fit"),
        ({"eos_token_id": 5000}, ModelCorrupt, "eos_token_id is 5000, not a token of 261"),
        ({"add_bos_token": 3}, ModelCorrupt, "add_bos_token is not true or false"),
        ({"model": "llama"}, ModelCorrupt, "scores"),
    ],
)
def test_what_cannot_be_a_tokenizer_is_refused(changes: dict[str, Any], error: type[ModelError], message: str) -> None:
    with pytest.raises(error, match=message):
        tokenizer_from_gguf(byte_level(**changes), "x")
