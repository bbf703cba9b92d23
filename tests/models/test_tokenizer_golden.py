"""Thousands of strings of many scripts, encoded as llama.cpp encodes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden.strings import HASH_DIGITS, encoding_hash, strings
from legato.exec.weights.gguf import read_metadata
from legato.models.tokenizer import Tokenizer, tokenizer_from_gguf

GOLDEN = Path(__file__).parent.parent / "golden" / "tokenizer_strings.json"

# A tag for struck-out text in Gemma's vocabulary, user-defined, so one token wherever it stands: in the file, and in
# Google's tokenizer. llama.cpp takes it for a misnamed end of sequence, and so for text where special tokens are text.
GEMMA_TAG, GEMMA_TAG_ID = "</s>", 212


def differing(tokenizer: Tokenizer, name: str) -> list[str]:
    """Strings whose encoding is not llama.cpp's."""
    hashes: str = json.loads(GOLDEN.read_text(encoding="utf-8"))[name]
    texts = strings()
    assert len(hashes) == len(texts) * HASH_DIGITS
    found = (encoding_hash(tokenizer.encode(text, add_special=False)) for text in texts)
    expected = (hashes[at : at + HASH_DIGITS] for at in range(0, len(hashes), HASH_DIGITS))
    return [text for text, ours, theirs in zip(texts, found, expected, strict=True) if ours != theirs]


def test_smollm2_encodes_as_llama_cpp_does(smollm2_path: Path) -> None:
    assert differing(tokenizer_from_gguf(read_metadata(smollm2_path), "smollm2"), "smollm2-135m") == []


def test_gemma3_encodes_as_llama_cpp_does_but_for_one_tag(gemma3_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(read_metadata(gemma3_path), "gemma3")
    different = differing(tokenizer, "gemma3-270m")
    assert [text for text in different if GEMMA_TAG not in text] == []
    assert all(GEMMA_TAG_ID in tokenizer.encode(text) for text in different)


@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_the_strings_come_back(fixture: str, request: pytest.FixtureRequest) -> None:
    tokenizer = tokenizer_from_gguf(read_metadata(request.getfixturevalue(fixture)), fixture)
    table = tokenizer.bytes_table(tokenizer.vocab_size)
    known = {piece[0] for piece in table if len(piece) == 1}
    for text in strings():
        if known.issuperset(text.encode()) and "▁" not in text:
            assert tokenizer.decode(tokenizer.encode(text)) == text
