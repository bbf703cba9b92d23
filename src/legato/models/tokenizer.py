"""`Tokenizer`: text to token ids and back, from a GGUF file's metadata or a folder's tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import tokenizers

from legato.errors import ModelCorrupt, ModelNotFound, ModelUnsupported, RequestError
from legato.models import byte_level
from legato.models.sentencepiece import SPACE, SentencePieceEncoder, SpecialTokens

# GGUF token types (gguf.TokenType)
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

# Tokens that end an answer whatever the metadata call them: llama.cpp's list (llama-vocab.cpp, special_eog_ids).
_END_TEXTS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"}
    | {"<EOT>", "_<EOT>", "<|end_of_text|>"}
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_FOLDER_EOS_FILES = ("generation_config.json", "config.json")


class _Encoder(Protocol):
    def encode(self, text: str, parse_special: bool) -> list[int]: ...


class Tokenizer:
    """Text to ids and back. Safe to use from several threads.

    `vocab_size`: tokens it knows (a model's embedding may have more rows). `bos_id`: None if there is none.
    `eos_ids`: every token that ends an answer. `add_bos`, `add_eos`: whether a prompt gets them.
    """

    def __init__(
        self,
        encoder: _Encoder,
        names: Sequence[str],
        token_bytes: Sequence[bytes],
        special_ids: Iterable[int],
        *,
        bos_id: int | None,
        eos_id: int | None,
        eos_ids: Iterable[int],
        add_bos: bool,
        add_eos: bool = False,
        strip_space: bool = False,
    ) -> None:
        self._encoder = encoder
        self._names = names
        self._bytes = token_bytes
        self.special_ids = frozenset(special_ids)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.eos_ids = frozenset(eos_ids)
        self.add_bos = add_bos and bos_id is not None
        self.add_eos = add_eos and eos_id is not None
        self._strip_space = strip_space

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self._names)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`. RequestError if it cannot be encoded as UTF-8 (it holds a lone surrogate).

        `add_special`: with the BOS and EOS that the model's prompts have; a BOS that the text already has (a rendered
        chat template often does) is not doubled. `parse_special`: "<|im_end|>" in the text is the token, not ten
        characters. True for rendered chat templates, as in transformers and vLLM: a message that contains the text
        of a special token therefore can pose as the template's own. False for everything else.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds a lone surrogate at character {error.start}, not valid Unicode"
            ) from None
        ids = self._encoder.encode(text, parse_special)
        if add_special and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. Special tokens are left out or written by name."""
        special = self.special_ids
        pieces = [
            (b"" if skip_special else self._names[number].encode()) if number in special else self._bytes[number]
            for number in ids
        ]
        text = b"".join(pieces).decode("utf-8", "replace")
        return text[1:] if self._strip_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes token `token_id` stands for, which may be part of a character. Empty for special tokens."""
        return self._bytes[token_id]

    def bytes_table(self, size: int) -> list[bytes]:
        """`token_bytes` of ids 0 to `size` - 1, the model's vocabulary; empty past the tokenizer's."""
        return [*self._bytes[:size], *[b""] * (size - self.vocab_size)]

    def token_name(self, token_id: int) -> str:
        """What to call a token in a list: its text, or its name if special, or its bytes where they are no text."""
        if token_id >= self.vocab_size:
            return f"<unused {token_id}>"
        if token_id in self.special_ids:
            return self._names[token_id]
        try:
            return self._bytes[token_id].decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in self._bytes[token_id])

    def id_of(self, text: str) -> int | None:
        """The id of the special token `text`, None if there is none."""
        return self._special_by_name.get(text)

    @cached_property
    def _special_by_name(self) -> dict[str, int]:
        return {self._names[number]: number for number in self.special_ids}


def tokenizer_from_gguf(metadata: Mapping[str, object], source: str) -> Tokenizer:
    """The tokenizer that a GGUF file's key-values describe. Raises ModelUnsupported or ModelCorrupt."""
    keys = _Keys(metadata, source)
    kind = metadata.get("tokenizer.ggml.model")
    tokens = keys.strings("tokens")
    types = keys.integers("token_type", len(tokens)) or [_NORMAL] * len(tokens)
    # Some converters leave these without their type, and the answer would run past its end.
    types = [_CONTROL if token in _END_TEXTS else type_ for token, type_ in zip(tokens, types, strict=True)]
    special = {number for number, type_ in enumerate(types) if type_ in (_CONTROL, _UNKNOWN)}
    eos_id = keys.token("eos_token_id", len(tokens))
    ends = {number for number in special if tokens[number] in _END_TEXTS}
    ends |= {found for key in _END_KEYS if (found := keys.token(key, len(tokens))) is not None}
    encoder: _Encoder
    if kind == "gpt2":
        pre = byte_level.pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "default")), source)
        encoder = _gguf_byte_level(keys, tokens, types, pre)
        add_bos, prefix = pre.add_bos, False
        token_bytes = _byte_level_bytes(tokens, special, {n for n, type_ in enumerate(types) if type_ == _USER_DEFINED})
    elif kind == "llama":
        add_bos, prefix = True, keys.flag("add_space_prefix", True)
        encoder = _gguf_sentencepiece(keys, tokens, types, prefix)
        bytes_ = {number for number, type_ in enumerate(types) if type_ == _BYTE}
        token_bytes = _sentencepiece_bytes(tokens, special, bytes_)
    else:
        raise ModelUnsupported(
            f"{source}: tokenizer {str(kind)[:40]!r} is not implemented; implemented: gpt2, llama (BPE)"
        )
    return Tokenizer(
        encoder,
        tokens,
        token_bytes,
        special,
        bos_id=keys.token("bos_token_id", len(tokens)),
        eos_id=eos_id,
        eos_ids=ends,
        add_bos=keys.flag("add_bos_token", add_bos),
        add_eos=keys.flag("add_eos_token", False),
        strip_space=prefix,
    )


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of tokenizer.json, with the special tokens its sister files name."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFound(f"{folder} has no tokenizer.json; other tokenizer files are not implemented")
    try:
        fast = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelCorrupt(f"{path} cannot be read: {str(error)[:200]}") from error
    fast.no_truncation()
    fast.no_padding()
    size = fast.get_vocab_size(with_added_tokens=True)
    names = [fast.id_to_token(number) or "" for number in range(size)]
    added = fast.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special}
    encoder = _FastEncoder(fast, special)
    if SPACE in json.dumps(_state(fast.decoder), ensure_ascii=False):
        bytes_ = {number for number, name in enumerate(names) if _byte_of(name) is not None}
        token_bytes = _sentencepiece_bytes(names, special, bytes_)
    else:
        token_bytes = _byte_level_bytes(names, special, set(added) - special)
    config = _read_optional_json(folder / "tokenizer_config.json")
    by_name = {names[number]: number for number in added if number < size}
    bos, eos = (by_name.get(_token_text(config.get(key)) or "") for key in ("bos_token", "eos_token"))
    ends = {number for number in special if names[number] in _END_TEXTS} | _folder_eos(folder, size)
    start, end = _around(fast)
    return Tokenizer(
        encoder,
        names,
        token_bytes,
        special,
        bos_id=start if start is not None else bos,
        eos_id=end if end is not None else eos,
        eos_ids=ends if eos is None else ends | {eos},
        add_bos=start is not None,
        add_eos=end is not None,
        strip_space='"Strip"' in json.dumps(_state(fast.decoder)),
    )


class _FastEncoder:
    """`tokenizers`' encoder. A second copy, made when first needed, takes special tokens in the text as text."""

    def __init__(self, fast: tokenizers.Tokenizer, special_ids: Iterable[int]) -> None:
        self._fast = fast
        self._special_ids = frozenset(special_ids)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        if parse_special or self._special_ids.isdisjoint(ids):
            return ids
        blind: list[int] = self._blind.encode(text, add_special_tokens=False).ids
        return blind

    @cached_property
    def _blind(self) -> tokenizers.Tokenizer:
        copy = tokenizers.Tokenizer.from_str(self._fast.to_str())
        copy.encode_special_tokens = True
        return copy


class _SentencePiece:
    """SentencePiece with tokens that are found in the text first: user-defined ones always, special ones on request."""

    def __init__(self, pieces: SentencePieceEncoder, always: Mapping[str, int], special: Mapping[str, int]) -> None:
        self._pieces = pieces
        self._always = SpecialTokens(always)
        self._all = SpecialTokens({**always, **special})
        self._special_ids = frozenset(special.values())

    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        after_special = True
        for part in (self._all if parse_special else self._always).split(text):
            if isinstance(part, int):
                ids.append(part)
                after_special = part in self._special_ids
            else:
                ids += self._pieces.encode(part, after_special=after_special)
                after_special = False
        return ids


def _gguf_byte_level(
    keys: _Keys, tokens: list[str], types: Sequence[int], pre: byte_level.PreTokenizer
) -> _FastEncoder:
    special = {tokens[number]: number for number, type_ in enumerate(types) if type_ in (_CONTROL, _UNKNOWN)}
    user_defined = [tokens[number] for number, type_ in enumerate(types) if type_ == _USER_DEFINED]
    fast = byte_level.build(tokens, keys.strings("merges"), pre, special, user_defined, keys.source)
    return _FastEncoder(fast, special.values())


def _gguf_sentencepiece(keys: _Keys, tokens: list[str], types: Sequence[int], prefix: bool) -> _SentencePiece:
    scores = keys.numbers("scores", len(tokens))
    normal = {token: score for token, score, type_ in zip(tokens, scores, types, strict=True) if type_ == _NORMAL}
    ids = {token: number for number, (token, type_) in enumerate(zip(tokens, types, strict=True)) if type_ == _NORMAL}
    byte_ids: list[int | None] = [None] * 256
    for number, type_ in enumerate(types):
        if type_ == _BYTE and (byte := _byte_of(tokens[number])) is not None:
            byte_ids[byte] = number
    unknown = keys.token("unknown_token_id", len(tokens))
    encoder = SentencePieceEncoder(ids, normal, byte_ids, unknown or 0, add_space_prefix=prefix)
    special = {tokens[number]: number for number, type_ in enumerate(types) if type_ in (_CONTROL, _UNKNOWN)}
    always = {tokens[number]: number for number, type_ in enumerate(types) if type_ == _USER_DEFINED}
    return _SentencePiece(encoder, always, special)


def _byte_level_bytes(tokens: Sequence[str], special: set[int], literal: set[int]) -> list[bytes]:
    alphabet = byte_level.byte_alphabet()
    table: list[bytes] = []
    for number, token in enumerate(tokens):
        if number in special:
            table.append(b"")
        elif number in literal or not alphabet.keys() >= set(token):
            table.append(token.encode())
        else:
            table.append(bytes([alphabet[character] for character in token]))
    return table


def _sentencepiece_bytes(tokens: Sequence[str], special: set[int], bytes_: set[int]) -> list[bytes]:
    table = [token.replace(SPACE, " ").encode() for token in tokens]
    for number in bytes_:
        byte = _byte_of(tokens[number])
        table[number] = b"" if byte is None else bytes([byte])
    for number in special:
        table[number] = b""
    return table


def _byte_of(name: str) -> int | None:
    """0x0A of "<0x0A>"."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return int(name[3:5], 16)
        except ValueError:
            return None
    return None


class _Keys:
    """Checked access to the `tokenizer.ggml.` keys."""

    def __init__(self, metadata: Mapping[str, object], source: str) -> None:
        self._metadata = metadata
        self.source = source

    def strings(self, key: str) -> list[str]:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise ModelCorrupt(f"{self.source}: tokenizer.ggml.{key} is missing or no list of strings")
        return value

    def integers(self, key: str, size: int) -> list[int] | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != size or not all(isinstance(item, int) for item in value):
            raise ModelCorrupt(f"{self.source}: tokenizer.ggml.{key} does not hold {size:,} integers")
        return value

    def numbers(self, key: str, size: int) -> list[float]:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, list) or len(value) != size or not all(isinstance(item, float) for item in value):
            raise ModelCorrupt(f"{self.source}: tokenizer.ggml.{key} does not hold {size:,} numbers")
        return value

    def token(self, key: str, size: int) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None or value == 0xFFFFFFFF:  # "none", as some converters write it
            return None
        if not isinstance(value, int) or not 0 <= value < size:
            raise ModelCorrupt(f"{self.source}: tokenizer.ggml.{key} is {str(value)[:40]}, not a token of {size:,}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise ModelCorrupt(f"{self.source}: tokenizer.ggml.{key} is not true or false")
        return value


def _state(part: object) -> object:
    """The JSON form of a part of a `tokenizers.Tokenizer`."""
    state: str | bytes = part.__getstate__() if part is not None else "null"  # type: ignore[assignment]
    return json.loads(state)


def _around(fast: tokenizers.Tokenizer) -> tuple[int | None, int | None]:
    """The special tokens that the post-processor puts before and after a text: (BOS, EOS)."""
    marked = fast.encode("a", add_special_tokens=True).ids
    plain = fast.encode("a", add_special_tokens=False).ids
    for at in range(len(marked) - len(plain) + 1):
        if marked[at : at + len(plain)] == plain:
            before, after = marked[:at], marked[at + len(plain) :]
            return (before[0] if before else None), (after[-1] if after else None)
    return None, None


def _folder_eos(folder: Path, size: int) -> set[int]:
    ids: set[int] = set()
    for file in _FOLDER_EOS_FILES:
        value = _read_optional_json(folder / file).get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and 0 <= item < size:
                ids.add(item)
    return ids


def _token_text(value: object) -> str | None:
    """A token in tokenizer_config.json: its text, or an object that has it as "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_optional_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelCorrupt(f"{path} cannot be read: {str(error)[:100]}") from None
    return value if isinstance(value, dict) else {}
