"""Finds published blocks by their chained keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvconnect.cache.tree.segment import Root, Segment
from kvconnect.keys import KEY_NBYTES, BlockKey, KeyChain, chain_keys, split_keys


class KeyIndex:
    """Maps the key of a segment's first block to the segment. Other keys are hashed by searches.

    The first search by key, or an event log, makes the index; before, nothing is hashed. A
    namespace has keys once a sequence with a key chain was added to it. Keys that such a chain or
    the index already has are not hashed again.
    """

    def __init__(self, roots: Iterable[Root], tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._first: dict[BlockKey, Segment] = {}
        for root in roots:
            self.named(root)

    def find(self, keys: Sequence[BlockKey]) -> tuple[Segment, int] | None:
        """Returns the deepest segment on the path of `keys`, and the number of keys that matched.

        The last matched block is in that segment. Returns ``None`` if no key matches.
        """
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
            for own in split_keys(segment.keys):
                if at == len(keys) or keys[at] != own:
                    return segment, at
                at += 1
        return None if found is None else (found, at)

    def keys_of(self, segment: Segment, first: int = 0) -> list[BlockKey]:
        """Returns the keys of the blocks of `segment` from its index `first` on.

        Hashes missing ones. Returns an empty list if the namespace has no chain root.
        """
        self._hash(segment, len(segment))
        return split_keys(segment.keys[first * KEY_NBYTES :])

    def named(self, root: Root) -> None:
        """Adds all segments below `root`, after `root` got its chain root."""
        waiting = list(root.children.values())
        while waiting:
            segment = waiting.pop()
            self.added(segment)
            waiting.extend(segment.children.values())

    def added(self, segment: Segment, chain: KeyChain | None = None) -> None:
        """Adds `segment`, which was inserted in the tree for a sequence with this `chain`."""
        if chain is not None:
            self.take(segment, chain)
        self._hash(segment, 1)
        if segment.keys:
            self._first.setdefault(_first_key(segment), segment)

    def take(self, segment: Segment, chain: KeyChain) -> None:
        """Copies missing keys of `segment` from `chain`, if the path of `chain` leads there.

        It hashes no token.
        """
        known = len(segment.keys) // KEY_NBYTES
        parent = self._key_before(segment, known)
        if parent is not None:
            low = 4 * self._tokens_per_block * known
            segment.keys += chain.known(segment.start + known, parent, segment.tokens, low)

    def teach(self, chain: KeyChain, segment: Segment, num_blocks: int) -> None:
        """Copies the keys of the first `num_blocks` blocks of the path to `segment` into `chain`.

        The tokens of `chain` must match those blocks. Missing keys are hashed, since later blocks
        need them.
        """
        if chain.num_hashed >= num_blocks:
            return
        path = segment.path()
        root = path[0].parent
        if not isinstance(root, Root) or root.chain_root != chain.root:
            return
        keys = bytearray()
        for step in path:
            self._hash(step, min(step.end, num_blocks) - step.start)
            keys += step.keys
        chain.learn(keys[: num_blocks * KEY_NBYTES])

    def divided(self, upper: Segment, lower: Segment) -> None:
        """Updates the index after `lower` was split; `upper` is its first part."""
        if upper.keys:
            first = _first_key(upper)
            if self._first.get(first) is lower:
                self._first[first] = upper
            self.added(lower)

    def joining(self, upper: Segment, lower: Segment) -> None:
        """Updates the index before `lower` absorbs `upper`.

        `lower` has keys only if all of `upper` do.
        """
        self.removed(lower)
        if upper.keys and self._first.get(_first_key(upper)) is upper:
            self._first[_first_key(upper)] = lower

    def removed(self, segment: Segment) -> None:
        """Removes `segment`, which left the tree."""
        # Callers that give two namespaces one chain root make equal keys: the first stays.
        if segment.keys and self._first.get(_first_key(segment)) is segment:
            del self._first[_first_key(segment)]

    def check(self, segments: Sequence[Segment]) -> None:
        """Raises `AssertionError` unless exactly the first keys of `segments` are indexed."""
        expected = {_first_key(segment) for segment in segments if segment.keys}
        right = all(_first_key(segment) == key for key, segment in self._first.items())
        if not right or self._first.keys() != expected:
            raise AssertionError("the key index has the first key of every segment, and no other")

    def _hash(self, segment: Segment, count: int) -> None:
        known = len(segment.keys) // KEY_NBYTES
        if known >= count:
            return
        parent = self._key_before(segment, known)
        if parent is not None:
            size = self._tokens_per_block
            tokens = segment.tokens[4 * size * known : 4 * size * count]
            segment.keys += chain_keys(parent, tokens, size)

    def _key_before(self, segment: Segment, known: int) -> bytes | None:
        # Returns the key before its block number `known`, the first without a key.
        if known:
            return bytes(segment.keys[-KEY_NBYTES:])
        parent = segment.parent
        if parent is None or isinstance(parent, Root):
            return None if parent is None else parent.chain_root
        self._hash(parent, len(parent))
        return bytes(parent.keys[-KEY_NBYTES:]) or None


def _first_key(segment: Segment) -> BlockKey:
    return BlockKey(bytes(segment.keys[:KEY_NBYTES]))
