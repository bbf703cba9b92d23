"""`ChatTemplate`: a conversation written out as the model was trained to read it, by the Jinja template of its file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from legato.errors import ModelCorrupt, ModelNotFound, RequestError

MAX_CHARACTERS = 16 << 20
"""Of a rendered conversation, of a string a template may multiply to, and of a template."""
_MAX_POWER_BITS = 4096

Message = Mapping[str, Any]
"""role, content, and whatever else the template reads."""


class ChatTemplate:
    """A compiled template, in transformers' dialect (trimmed blocks, loop controls, `raise_exception`, `strftime_now`,
    `tojson`, `{% generation %}`), in Jinja's sandbox. Raises ModelCorrupt if it cannot be compiled.

    `bos_token`, `eos_token`: their texts, which most templates write out. `source`: for messages.
    """

    def __init__(
        self, template: str, *, bos_token: str = "", eos_token: str = "", source: str = "chat template"
    ) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        if len(template) > MAX_CHARACTERS:
            raise ModelCorrupt(f"{source}: a template of {len(template):,} characters; the limit is {MAX_CHARACTERS:,}")
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateSyntaxError as error:
            raise ModelCorrupt(
                f"{source}: the chat template is not valid, line {error.lineno}: {error.message}"
            ) from error
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, OverflowError) as error:
            raise ModelCorrupt(f"{source}: the chat template cannot be compiled: {str(error)[:200]}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text, ready for the answer if `add_generation_prompt`.

        To be encoded with `parse_special=True, add_special=True`. RequestError with the template's own words if it
        refuses the messages, and if it writes more than `MAX_CHARACTERS`.
        """
        context = {**self._tokens, **variables, "messages": list(messages), "tools": tools}
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(**context, add_generation_prompt=add_generation_prompt):
                size += len(piece)
                if size > MAX_CHARACTERS:
                    raise RequestError(f"the chat template writes over {MAX_CHARACTERS:,} characters", field="messages")
                pieces.append(piece)
        except RequestError:
            raise
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused the messages: {error.message}", field="messages") from error
        except Exception as error:  # a template is a program: it can fail in every way
            raise RequestError(
                f"the chat template failed on these messages: {type(error).__name__}: {str(error)[:200]}",
                field="messages",
            ) from error
        return "".join(pieces)


def template_from_gguf(metadata: Mapping[str, object], source: str) -> str | None:
    """The template text in a GGUF file's key-values, None if it has none."""
    text = metadata.get("tokenizer.chat_template")
    if text is not None and not isinstance(text, str):
        raise ModelCorrupt(f"{source}: tokenizer.chat_template is no string")
    return text or None


def template_from_folder(folder: Path) -> str | None:
    """The template text of a folder: chat_template.jinja, else tokenizer_config.json (the default one), else None."""
    if (folder / "chat_template.jinja").is_file():
        return template_from_file(folder / "chat_template.jinja")
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    try:
        found = json.loads(config.read_bytes()).get("chat_template")
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise ModelCorrupt(f"{config} cannot be read: {str(error)[:100]}") from None
    if isinstance(found, list):  # several named ones
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def template_from_file(path: Path) -> str:
    """The template text in a file. ModelNotFound or ModelCorrupt."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelNotFound(f"cannot read the chat template {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ModelCorrupt(f"the chat template {path} is not UTF-8") from None


def no_template(model: str) -> RequestError:
    """The refusal of a chat request to a model without a template. None is made up: it was trained on none."""
    return RequestError(
        f"{model} has no chat template (it is a base model); use /v1/completions, or start the server with "
        "--chat-template FILE",
        field="messages",
    )


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which also bounds `range`, with bounds on the two operators that make much of little."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if (
                    isinstance(value, str | list | tuple)
                    and isinstance(count, int)
                    and len(value) * count > MAX_CHARACTERS
                ):
                    raise jinja2.TemplateRuntimeError(f"a product of over {MAX_CHARACTERS:,} elements")
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_POWER_BITS:
            raise jinja2.TemplateRuntimeError(f"a power of over {_MAX_POWER_BITS} bits")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks the assistant's words for training; here just their text."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: Jinja's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
