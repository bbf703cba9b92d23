"""Writes tests/golden/tokenizer_strings.json with llama.cpp's tokenizer. Runs in the llama_cpp peer's environment.

python make_strings.py smollm2-135m=FILE.gguf gemma3-270m=FILE.gguf
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llama_cpp import Llama

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
sys.path.insert(0, str(GOLDEN))
from strings import encoding_hash, strings  # noqa: E402


def hashes(model: str) -> str:
    """The hash of every string's encoding, joined."""
    tokenizer = Llama(model, vocab_only=True, verbose=False)
    encodings = (tokenizer.tokenize(text.encode(), add_bos=False, special=False) for text in strings())
    return "".join(encoding_hash(list(ids)) for ids in encodings)


def main(arguments: list[str]) -> None:
    """Each argument is NAME=FILE."""
    record = {name: hashes(model) for name, model in (argument.split("=", 1) for argument in arguments)}
    (GOLDEN / "tokenizer_strings.json").write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
