"""Byte-level BPE as in GGUF files of GPT-2's line (model type "gpt2"), built on `tokenizers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from legato.errors import ModelCorrupt, ModelUnsupported

# The split patterns are those of the models' tokenizer.json files.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merging. `split`: a pattern, or None for GPT-2's. `digits`: each digit by itself first.

    `whole_words`: a word that is a token is not taken apart (tokenizers' `ignore_merges`). `add_bos`: where the file
    does not say.
    """

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "default": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "llama-bpe": PreTokenizer(split=_LLAMA3, whole_words=True, add_bos=True),
    "qwen2": PreTokenizer(split=_QWEN2, nfc=True),
    "tekken": PreTokenizer(split=_TEKKEN, whole_words=True, add_bos=True),
}


def pre_tokenizer(name: str, source: str) -> PreTokenizer:
    """The one of this name in `tokenizer.ggml.pre`. ModelUnsupported if it is not known."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise ModelUnsupported(
            f"{source}: pre-tokenizer {name[:40]!r} is not implemented; implemented: {', '.join(PRE_TOKENIZERS)}"
        ) from None


def build(
    tokens: Sequence[str],
    merges: Sequence[str],
    pre: PreTokenizer,
    special: Mapping[str, int],
    user_defined: Sequence[str],
    source: str,
) -> tokenizers.Tokenizer:
    """A tokenizer without post-processing. `special` tokens match when asked for, `user_defined` ones always."""
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    if not all(len(pair) == 2 for pair in pairs):
        raise ModelCorrupt(f"{source}: tokenizer.ggml.merges holds an entry that is no pair")
    try:
        model = tokenizers.models.BPE(
            {token: number for number, token in enumerate(tokens)},
            pairs,  # type: ignore[arg-type]
            ignore_merges=pre.whole_words,
        )
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelCorrupt(f"{source}: the tokenizer's merges do not fit its vocabulary: {str(error)[:200]}") from error
    tokenizer = tokenizers.Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _steps(pre)
    tokenizer.add_special_tokens([_added(text, special=True) for text in special])
    tokenizer.add_tokens([_added(text, special=False) for text in user_defined])
    return tokenizer


def _steps(pre: PreTokenizer) -> Any:
    steps: list[Any] = []
    if pre.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.split is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(pre.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    return pre_tokenizers.Sequence(steps)


def _added(text: str, *, special: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(text, special=special, normalized=False)


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's alphabet: printable Latin-1 for itself, the rest from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}
