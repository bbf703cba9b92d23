"""What names a KV block: the hash of everything its keys and values depend on. And `Prefix`: what is found by name."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from legato.core.blocks import Name


def root_key(*parts: bytes) -> bytes:
    """What a chain of block keys begins with: the model with all options that change bits, the adapter, the tenant.

    Each part counts with its length, so that no two lists of parts can be taken for each other.
    """
    digest = sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def block_key(parent: bytes, tokens: bytes, attachments: Iterable[tuple[int, bytes]] = ()) -> bytes:
    """The key of a block after `parent`, with its token ids as int32 and what stands at its positions besides: images.

    SHA-256, so that no tenant can make a prompt that hits another one's blocks. Cost: a microsecond for 32 tokens.
    """
    digest = sha256(parent)
    digest.update(tokens)
    for position, content in attachments:
        digest.update(position.to_bytes(8, "little"))
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.digest()


class KeyChain:
    """The keys of one sequence's whole blocks, made as its tokens become known.

    `attachments`: (position, digest) of what a position holds besides its token; a key depends on all before its end.
    """

    __slots__ = ("_attachments", "_block_tokens", "_root", "keys")

    def __init__(self, root: bytes, block_tokens: int, attachments: tuple[tuple[int, bytes], ...] = ()) -> None:
        self._root = root
        self._block_tokens = block_tokens
        self._attachments = attachments
        self.keys: list[bytes] = []

    def name(self, index: int) -> Name:
        """What block `index` is found by."""
        return Name(self.keys[index], self.keys[index - 1] if index else b"")

    def extend(self, tokens: array[int]) -> None:
        """Adds the keys of all blocks that `tokens`, which only ever grows, fills."""
        width = self._block_tokens
        for index in range(len(self.keys), len(tokens) // width):
            start, stop = index * width, (index + 1) * width
            within = [entry for entry in self._attachments if start <= entry[0] < stop] if self._attachments else ()
            parent = self.keys[index - 1] if index else self._root
            self.keys.append(block_key(parent, tokens[start:stop].tobytes(), within))


def leading(keys: Sequence[bytes], index: Container[bytes], limit: int) -> int:
    """How many of the first `limit` keys are in `index`, given that no key is there without those before it.

    That holds for the pool: whoever holds a block holds those before it, and they are given up last. Cost: O(log n).
    """
    if not limit or keys[0] not in index:
        return 0
    return bisect_left(keys, True, hi=limit, key=lambda key: key not in index)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a waiting request need not compute. Units: blocks, whole ones only, from the beginning of the sequence.

    `blocks`: in the pool, computed. `idle_blocks`: how many of them nobody holds: they still count as free.
    `stored_blocks`: those after them that are kept in host memory and can be copied back.
    `next_key`: of the first block that is not in the pool, if it is whole; `maker`: the running request that is to
    compute it.
    """

    blocks: int = 0
    idle_blocks: int = 0
    stored_blocks: int = 0
    next_key: bytes | None = None
    maker: int | None = None


NOTHING = Prefix()
