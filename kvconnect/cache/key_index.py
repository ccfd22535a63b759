"""Finds published blocks by their chained keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvconnect.cache.segment import Root, Segment
from kvconnect.keys import BlockKey, chain_key

__all__ = ["KeyIndex"]


class KeyIndex:
    """Segments by the key of their first block. Other keys are hashed when a search gets there.

    Made when the first search comes: who never asks by key never hashes for it. Namespaces in which
    no sequence brought a key chain have no keys.
    """

    def __init__(self, roots: Iterable[Root], tokens_per_block: int) -> None:
        self._stride = 4 * tokens_per_block
        self._first: dict[BlockKey, Segment] = {}
        for root in roots:
            self.named(root)

    def __len__(self) -> int:
        return len(self._first)

    def find(self, keys: Sequence[BlockKey]) -> tuple[Segment, int] | None:
        """The deepest segment on the path of `keys`, and how many of them lead there."""
        found: Segment | None = None
        at = 0
        while at < len(keys):
            segment = self._first.get(keys[at])
            if segment is None or segment.start != at:
                break
            if found is not None and segment.parent is not found:
                break
            self._hash(segment, len(segment))
            found = segment
            for own in segment.keys:
                if at == len(keys) or keys[at] != own:
                    return segment, at
                at += 1
        return None if found is None else (found, at)

    def keys_of(self, segment: Segment) -> Sequence[BlockKey]:
        """The keys of its blocks, one each; none if its namespace has no chain root."""
        self._hash(segment, len(segment))
        return segment.keys

    def named(self, root: Root) -> None:
        """`root` got its chain root: what is below it has keys now."""
        waiting = list(root.children)
        while waiting:
            segment = waiting.pop()
            self.added(segment)
            waiting.extend(segment.children)

    def added(self, segment: Segment) -> None:
        """`segment` was inserted."""
        self._hash(segment, 1)
        if segment.keys:
            self._first.setdefault(segment.keys[0], segment)

    def divided(self, upper: Segment, lower: Segment) -> None:
        """`lower` was split; `upper` is its first part."""
        if upper.keys:
            if self._first.get(upper.keys[0]) is lower:
                self._first[upper.keys[0]] = upper
            self.added(lower)

    def removed(self, segment: Segment) -> None:
        """`segment` left the tree."""
        self._forget(segment)

    def check(self, segments: Sequence[Segment]) -> None:
        """Raise `AssertionError` unless just the first keys of `segments` are here."""
        expected = {segment.keys[0] for segment in segments if segment.keys}
        right = all(segment.keys[0] == key for key, segment in self._first.items())
        if not right or self._first.keys() != expected:
            raise AssertionError("the key index has the first key of every segment, and no other")

    def _forget(self, segment: Segment) -> None:
        # Callers that give two namespaces one chain root make equal keys: the first stays.
        if segment.keys and self._first.get(segment.keys[0]) is segment:
            del self._first[segment.keys[0]]

    def _hash(self, segment: Segment, count: int) -> None:
        if len(segment.keys) >= count:
            return
        parent = segment.keys[-1] if segment.keys else self._key_before(segment)
        if parent is None:
            return
        tokens = bytes(segment.tokens)
        for block in range(len(segment.keys), count):
            low = block * self._stride
            parent = chain_key(parent, np.frombuffer(tokens[low : low + self._stride], np.int32))
            segment.keys.append(parent)

    def _key_before(self, segment: Segment) -> BlockKey | None:
        parent = segment.parent
        if parent is None or isinstance(parent, Root):
            return None if parent is None else parent.chain_root
        self._hash(parent, len(parent))
        return parent.keys[-1] if parent.keys else None
