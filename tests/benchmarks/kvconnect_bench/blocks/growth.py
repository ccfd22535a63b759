"""Measures how the time of a request grows with its tokens, and with the cached blocks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from kvconnect_bench.blocks.own_cache import OwnCache
from kvconnect_bench.blocks.traffic import BLOCK, TokenIds, cached, fresh, serve_one, settle

_BATCH = 200
_REQUEST_BLOCKS = 32

_VOCABULARY = 2**31 - 1
"""The vocabulary is so large that prompts begin with the same token only where that is wanted. A
block that matches in part is copied, and such copies are not what a larger cache costs."""


def by_tokens(sizes: Sequence[int], repeats: int) -> dict[str, list[float]]:
    """Returns the median seconds of a request by its tokens, wholly cached and wholly new."""
    rounds: dict[str, list[float]] = {"cached": [], "fresh": []}
    for tokens in sizes:
        blocks = tokens // BLOCK + 1
        seconds = cached(OwnCache(blocks), tokens=tokens, repeats=repeats)
        rounds["cached"].append(statistics.median(seconds))
        seconds = fresh(OwnCache(blocks), tokens=tokens, repeats=repeats)
        rounds["fresh"].append(statistics.median(seconds))
    return rounds


def by_cached_blocks(sizes: Sequence[int], rounds: int) -> dict[str, list[float]]:
    """Returns the median seconds of a request of 512 tokens in full pools, by their sizes.

    ``shared``: half of its tokens are one of ``size / 128`` shared prefixes; ``fresh``: none are;
    ``alike``: all requests begin with the same token, and share no more. The sizes take turns, so
    that other load of the machine falls on all of them.
    """
    found = {}
    half = _REQUEST_BLOCKS // 2
    for name, shared, alike in (("shared", half, False), ("fresh", 0, False), ("alike", 0, True)):
        pools = [_FullPool(size, shared, alike=alike) for size in sizes]
        settle()
        seconds = [[pool.serve(_BATCH) / _BATCH for pool in pools] for _ in range(rounds)]
        found[name] = [statistics.median(times) for times in zip(*seconds, strict=True)]
    return found


class _FullPool:
    """A pool full of cached prompts, each `shared` blocks of a common prefix and own ones.

    With `alike` they all begin with the same token.
    """

    def __init__(self, num_blocks: int, shared: int, *, alike: bool) -> None:
        self._cache = OwnCache(num_blocks)
        self._alike = alike
        self._rng = np.random.default_rng(num_blocks)
        # An eighth of the pool: the prefixes are used too often to be reclaimed.
        groups = max(1, num_blocks // 8 // shared) if shared else 1
        self._prefixes = [self._random(shared) for _ in range(groups)]
        self._own = _REQUEST_BLOCKS - shared
        self.serve(2 * num_blocks // self._own + groups)

    def serve(self, count: int) -> float:
        """Returns the seconds of `count` requests, one after the other."""
        cache, seconds = self._cache, 0.0
        for group in self._rng.integers(0, len(self._prefixes), count):
            tokens = np.concatenate((self._prefixes[group], self._random(self._own)))
            if self._alike:
                tokens[0] = 1
            seconds += serve_one(cache, cache.request(tokens))
        return seconds

    def _random(self, num_blocks: int) -> TokenIds:
        return self._rng.integers(0, _VOCABULARY, num_blocks * BLOCK, dtype=np.int32)
