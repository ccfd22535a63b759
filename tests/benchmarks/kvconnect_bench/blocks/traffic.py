"""The traffic that every party serves, and how its time is taken."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK", "Cache", "cached", "fresh", "mixed", "serve_one", "settle"]

BLOCK = 16
"""Tokens of a block."""

_VOCABULARY = 100_000
_BATCH = 250

TokenIds = npt.NDArray[np.int32]


class Cache(Protocol):
    """One party's block manager, freshly made. Requests are whatever the party makes of tokens."""

    def request(self, tokens: TokenIds) -> Any:
        """A request in the party's own form; its time does not count."""

    def match(self, request: Any) -> None:
        """Find what is cached of it."""

    def claim(self, request: Any) -> None:
        """Take the blocks that matched, and new ones for the rest; the block ids are known then."""

    def publish(self, request: Any) -> None:
        """The KV of all its tokens is valid: others can reuse it from now on."""

    def release(self, request: Any) -> None:
        """Let go of its blocks; they stay cached."""


def cached(cache: Cache, *, tokens: int, repeats: int) -> list[float]:
    """Seconds of match, claim and release of a prompt that is cached as a whole."""
    prompt = _random(np.random.default_rng(1), tokens)
    serve_one(cache, cache.request(prompt))
    requests = [cache.request(prompt) for _ in range(repeats)]
    settle()
    return [_timed_reuse(cache, request) for request in requests]


def fresh(cache: Cache, *, tokens: int, repeats: int) -> list[float]:
    """Seconds of allocating, publishing and releasing a prompt of which nothing is cached.

    The pool holds one prompt, and is full: each prompt takes the blocks of the one before.
    """
    rng = np.random.default_rng(2)
    serve_one(cache, cache.request(_random(rng, tokens)))
    requests = [cache.request(_random(rng, tokens)) for _ in range(repeats)]
    settle()
    return [serve_one(cache, request) for request in requests]


def mixed(
    cache: Cache, *, requests: int, groups: int, shared: int, unique: int, live: int
) -> float:
    """Seconds of `requests` requests, each a group's `shared` tokens and `unique` ones of its own.

    `live` of them are live at any time; the oldest is released before the next one comes.
    """
    rng = np.random.default_rng(3)
    prefixes = [_random(rng, shared) for _ in range(groups)]
    running: deque[Any] = deque()
    seconds = 0.0
    settle()
    for size in _batches(requests):
        picked = [prefixes[group] for group in rng.integers(0, groups, size)]
        batch = [cache.request(np.concatenate((prefix, _random(rng, unique)))) for prefix in picked]
        start = time.perf_counter()
        for request in batch:
            if len(running) == live:
                cache.release(running.popleft())
            cache.match(request)
            cache.claim(request)
            cache.publish(request)
            running.append(request)
        seconds += time.perf_counter() - start
    start = time.perf_counter()
    while running:
        cache.release(running.popleft())
    return seconds + time.perf_counter() - start


def settle() -> None:
    """Collect garbage, and take what is there out of later collections, as servers do."""
    gc.collect()
    gc.freeze()


def _timed_reuse(cache: Cache, request: Any) -> float:
    start = time.perf_counter()
    cache.match(request)
    cache.claim(request)
    cache.release(request)
    return time.perf_counter() - start


def serve_one(cache: Cache, request: Any) -> float:
    """Seconds of one request from match to release."""
    start = time.perf_counter()
    cache.match(request)
    cache.claim(request)
    cache.publish(request)
    cache.release(request)
    return time.perf_counter() - start


def _random(rng: np.random.Generator, size: int) -> TokenIds:
    return rng.integers(0, _VOCABULARY, size, dtype=np.int32)


def _batches(count: int) -> Iterator[int]:
    for done in range(0, count, _BATCH):
        yield min(_BATCH, count - done)
