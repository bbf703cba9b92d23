"""The text side of the fake engine: a token is a byte, a conversation is "role:content|" for each turn."""

from __future__ import annotations

from legato.engine.text import ModelText
from legato.server.served import ServedModel
from server.fake_engine import END, EOS, START, TOKEN_BYTES, VOCAB

NAMES = {EOS: "<|eos|>", START: "<|start|>", END: "<|end|>"}


def render(messages: list[dict[str, str]]) -> str:
    return "".join(f"{message['role']}:{message['content']}|" for message in messages)


def encode(text: str) -> list[int]:
    return list(text.encode())


def token_name(token_id: int) -> str:
    return NAMES.get(token_id) or bytes([token_id]).decode("latin-1")


def fake_model() -> ServedModel:
    text = ModelText(
        vocab=VOCAB,
        eos_ids=frozenset({EOS}),
        token_bytes=TOKEN_BYTES,
        token_name=token_name,
        encode=encode,
        render=render,
        encode_chat=encode,
    )
    return ServedModel(names=("fake", "/models/fake.gguf"), created=1_700_000_000, text=text)
