"""`Recall`: how much of a prompt the engine will find computed, told from what it was sent before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import takewhile


class Recall:
    """Which blocks the last prompts filled, `blocks` of them at most: as many as the pool holds.

    An estimate: answers take blocks too, and of an aborted prompt only a part was computed. What is thought to be
    there and is not is computed, so it is there the next time. With 0 blocks nothing is ever found.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._blocks = blocks
        self._block_tokens = block_tokens
        # The least recently sent first, and of one prompt the end before the beginning, as the pool gives them up.
        self._known: OrderedDict[int, None] = OrderedDict()

    def missing_tokens(self, prompts: Iterable[tuple[int, ...]], salt: bytes) -> int:
        """Tokens of `prompts`, if they were sent together now, that would have to be computed. Changes nothing."""
        missing, fresh = 0, set[int]()
        for prompt in prompts:
            keys = self._keys(prompt, salt)
            found = sum(1 for _ in takewhile(lambda key: key in self._known or key in fresh, keys))
            fresh.update(keys)
            missing += len(prompt) - found * self._block_tokens
        return missing

    def send(self, prompt: tuple[int, ...], salt: bytes) -> int:
        """The same of one that is sent now, and will be found from now on."""
        keys, known = self._keys(prompt, salt), self._known
        found = sum(1 for _ in takewhile(known.__contains__, keys))
        for key in reversed(keys):
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._blocks:
            known.popitem(last=False)
        return len(prompt) - found * self._block_tokens

    def _keys(self, prompt: tuple[int, ...], salt: bytes) -> list[int]:
        """Of all blocks that may be found: the last token is computed in any case, and with it its block.

        Python's own hash, an eighth of the cost of SHA-256: a collision that somebody makes misleads a forecast.
        Cost: a microsecond for 32 tokens.
        """
        if not self._blocks:
            return []
        width, key, keys = self._block_tokens, hash(salt), []
        for start in range(0, (len(prompt) - 1) // width * width, width):
            key = hash((key, prompt[start : start + width]))
            keys.append(key)
        return keys
