"""The compressed radix tree: which token paths are published, and in which blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvconnect.cache.key_index import KeyIndex
from kvconnect.cache.segment import BlockIds, Root, Segment
from kvconnect.keys import BlockKey, Namespace

__all__ = ["Match", "PartialSource", "RadixTree", "TokenBytes"]

TokenBytes = bytes | bytearray
"""Tokens as native int32 bytes: slices, hashes and compares at memcmp speed."""


class PartialSource(NamedTuple):
    """The first `num_tokens` tokens of block number `block`, which lies in `segment`."""

    segment: Segment
    block: int
    num_tokens: int


class Match(NamedTuple):
    """What is published of some tokens.

    Attributes:
        segment: the deepest one reached; ``None``: not even one block.
        num_blocks: whole blocks from the root on; may end within `segment`.
        source: the block that matches partly after them.
    """

    segment: Segment | None
    num_blocks: int
    source: PartialSource | None


class RadixTree:
    """Token paths by namespace, in runs of blocks.

    It moves segments; what their state means is the pool's affair.

    Attributes:
        index: finds segments by block key, once somebody asked for that.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._stride = 4 * tokens_per_block
        self._roots: dict[Namespace, Root] = {}
        self.index: KeyIndex | None = None

    @property
    def roots(self) -> dict[Namespace, Root]:
        """The root of each namespace that has something published. Not to be changed."""
        return self._roots

    def root(self, namespace: Namespace, chain_root: BlockKey | None = None) -> Root:
        """The namespace's root, made if need be; it goes with its last child.

        The first `chain_root` that is given is the key before its first blocks.
        """
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace)
        if root.chain_root is None and chain_root is not None:
            root.chain_root = chain_root
            if self.index is not None:
                self.index.named(root)
        return root

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self.index = None

    # ---------------------------------------------------------------- queries: these change nothing

    def match(
        self, namespace: Namespace, tokens: TokenBytes, limit: int, *, partial: bool, copy: bool
    ) -> Match:
        """What is published of the first `limit` of `tokens`.

        Args:
            namespace: whose tree.
            tokens: as bytes.
            limit: tokens that may match.
            partial: also look for a block that matches partly.
            copy: any block may be its source; else only one that nobody uses or depends on.
        """
        root = self._roots.get(namespace)
        if root is None:
            return Match(None, 0, None)
        segment, num_blocks = self.walk(root, tokens, limit // self._tokens_per_block)
        source = None
        if partial:
            rest = tokens[num_blocks * self._stride : 4 * limit][: self._stride]
            source = self._partial(segment, num_blocks, bytes(rest), copy=copy)
        return Match(None if segment is root else segment, num_blocks, source)

    def walk(self, segment: Segment, tokens: TokenBytes, stop: int) -> tuple[Segment, int]:
        """Follow whole blocks of `tokens` from the end of `segment`, up to `stop` blocks.

        Returns the deepest segment reached and the blocks that matched, from the root on.
        """
        stride = self._stride
        at = segment.end
        while at < stop:
            child = segment.children.get(bytes(tokens[at * stride : (at + 1) * stride]))
            if child is None:
                break
            segment = child
            count = len(child.ids)
            if count == 1 or (at + count <= stop and tokens.startswith(child.tokens, at * stride)):
                at += count
                continue
            count = min(count, stop - at)
            at += self._common(tokens, at, child.tokens, count)
            break
        return segment, at

    def published_tail(self, segment: Segment, at: int, tail: TokenBytes) -> bool:
        """Whether some block after the first `at` of this path begins with `tail`."""
        if at < segment.end:
            low = (at - segment.start) * self._stride
            return segment.tokens.startswith(tail, low)
        return segment.children.begun_by(bytes(tail)) is not None

    def _common(self, tokens: TokenBytes, at: int, other: bytearray, count: int) -> int:
        # Whole blocks that `tokens` from block `at` on and the first `count` of `other` share.
        size = count * self._tokens_per_block
        left = np.frombuffer(tokens, np.int32, size, at * self._stride)
        differs = left != np.frombuffer(other, np.int32, size)
        first = int(differs.argmax())
        return first // self._tokens_per_block if differs[first] else count

    def _partial(
        self, segment: Segment, at: int, rest: bytes, *, copy: bool
    ) -> PartialSource | None:
        if not rest:
            return None
        if at < segment.end:
            low = (at - segment.start) * self._stride
            shared = _shared_tokens(rest, bytes(segment.tokens[low : low + self._stride]))
            if shared and (copy or takeable(segment, at)):
                return PartialSource(segment, at, shared)
            return None
        return self._partial_child(segment, rest, copy=copy)

    def _partial_child(self, segment: Segment, rest: bytes, *, copy: bool) -> PartialSource | None:
        # Those that share the first k tokens lie together around the place of `rest`; each round
        # looks at one more such range, with a smaller k, until it has one that may be used.
        keys = segment.children.keys
        low = high = segment.children.place(rest)
        while True:
            before = _shared_tokens(rest, keys[low - 1]) if low else 0
            after = _shared_tokens(rest, keys[high]) if high < len(keys) else 0
            shared = max(before, after)
            if shared == 0:
                return None
            old_low, old_high = low, high
            low, high = segment.children.range(rest[: 4 * shared], self._stride)
            found = segment.children.segments
            candidates = found[low:old_low] + found[old_high:high]
            if not copy:
                candidates = [child for child in candidates if takeable(child, child.start)]
            if candidates:
                best = max(candidates, key=_recency)
                return PartialSource(best, best.start, shared)

    # ---------------------------------------------------------------- changes

    def insert(self, parent: Segment, tokens: bytearray, ids: BlockIds) -> Segment:
        """Add a segment after `parent`, which has no child that begins with the same block."""
        segment = Segment(parent, parent.end, tokens, ids)
        parent.children.add(bytes(tokens[: self._stride]), segment)
        if self.index is not None:
            self.index.added(segment)
        return segment

    def split(self, segment: Segment, at: int) -> Segment:
        """Divide `segment` before block number `at`; returns the upper part, a new segment.

        Both parts have the state of the whole. `segment` becomes the lower part.
        """
        count = at - segment.start
        cut = count * self._stride
        upper = Segment(segment.parent, segment.start, segment.tokens[:cut], segment.ids[:count])
        upper.references = segment.references
        upper.retention = segment.retention
        upper.expires = segment.expires
        upper.stamp = segment.stamp
        upper.keys = segment.keys[:count]
        if segment.parent is not None:
            segment.parent.children.replace(bytes(segment.tokens[: self._stride]), upper)
        segment.parent, segment.start = upper, at
        segment.tokens, segment.ids = segment.tokens[cut:], segment.ids[count:]
        segment.keys = segment.keys[count:]
        upper.children.add(bytes(segment.tokens[: self._stride]), segment)
        if self.index is not None:
            self.index.divided(upper, segment)
        return upper

    def cut(self, segment: Segment, count: int) -> BlockIds:
        """Take the last `count` blocks off a segment without children; their ids.

        One that loses all its blocks leaves the tree.
        """
        keep = len(segment.ids) - count
        if keep == 0:
            self._remove(segment)
            return segment.ids
        taken = segment.ids[keep:]
        del segment.ids[keep:], segment.tokens[keep * self._stride :], segment.keys[keep:]
        return taken

    def _remove(self, segment: Segment) -> None:
        parent = segment.parent
        if parent is None:
            return
        if self.index is not None:
            self.index.removed(segment)
        parent.children.remove(bytes(segment.tokens[: self._stride]))
        if isinstance(parent, Root) and not parent.children:
            del self._roots[parent.namespace]


def takeable(segment: Segment, block: int) -> bool:
    """Whether nobody uses that block and nothing follows it."""
    return segment.is_free_leaf and block == segment.end - 1


def _recency(segment: Segment) -> int:
    return segment.stamp


def _shared_tokens(left: bytes, right: bytes) -> int:
    size = min(len(left), len(right)) // 4
    differs = np.frombuffer(left, np.int32, size) != np.frombuffer(right, np.int32, size)
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size
