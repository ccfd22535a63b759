"""Hashes of prefixes by their tokens, for readers of events of any engine."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

_LINK_NBYTES = 16


def prefix_links(
    tokens: Sequence[int], block_size: int, adapter: str | int | None = None, extra: str = ""
) -> Iterator[bytes]:
    """Yields a chained hash for each full block of `tokens`, computed as it is needed.

    Equal ones stand for equal prefixes under the same adapter and `extra`, whatever hash an engine
    uses itself.
    """
    link = blake2b(repr((block_size, adapter, extra)).encode(), digest_size=_LINK_NBYTES).digest()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        link = next_link(link, tokens[start : start + block_size])
        yield link


def next_link(link: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the hash of the prefix `link` and one more block of `tokens`."""
    return blake2b(link + array("q", tokens).tobytes(), digest_size=_LINK_NBYTES).digest()
