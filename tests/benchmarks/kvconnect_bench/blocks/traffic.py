"""The traffic that every party serves, and the measurement of its time."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

BLOCK = 16
"""The tokens of a block."""

_VOCABULARY = 100_000
_BATCH = 250

TokenIds = npt.NDArray[np.int32]


class Cache(Protocol):
    """A party's new block manager. The party chooses the type of its requests."""

    def request(self, tokens: TokenIds) -> Any:
        """Makes a request in the party's own form; its time does not count."""

    def match(self, request: Any) -> None:
        """Finds the cached blocks of the request."""

    def claim(self, request: Any) -> None:
        """Takes the blocks that matched, and new ones for the rest; makes the block ids known."""

    def publish(self, request: Any) -> None:
        """Declares the KV of all tokens valid, so that other requests can reuse it."""

    def release(self, request: Any) -> None:
        """Releases the blocks of the request; they stay cached."""


def cached(cache: Cache, *, tokens: int, repeats: int) -> list[float]:
    """Returns the seconds of match, claim and release of a prompt that is cached as a whole."""
    prompt = _random(np.random.default_rng(1), tokens)
    serve_one(cache, cache.request(prompt))
    requests = [cache.request(prompt) for _ in range(repeats)]
    settle()
    return [_timed_reuse(cache, request) for request in requests]


def fresh(cache: Cache, *, tokens: int, repeats: int) -> list[float]:
    """Returns the seconds of allocating, publishing and releasing a prompt that is not cached.

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
    """Returns the seconds of `requests` requests.

    Each has the `shared` tokens of its group, and `unique` ones of its own. `live` requests are
    live at any time; the oldest is released before the next one comes.
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
    """Collects garbage, and excludes what remains from later collections, as servers do."""
    gc.collect()
    gc.freeze()


def _timed_reuse(cache: Cache, request: Any) -> float:
    start = time.perf_counter()
    cache.match(request)
    cache.claim(request)
    cache.release(request)
    return time.perf_counter() - start


def serve_one(cache: Cache, request: Any) -> float:
    """Returns the seconds of one request from match to release."""
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
