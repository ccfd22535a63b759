"""The compressed radix tree: the published token paths of all pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvconnect.cache.tree.key_index import KeyIndex
from kvconnect.cache.tree.segment import Root, Segment
from kvconnect.keys import KEY_NBYTES, BlockKey, KeyChain, NamespaceId

_LONGEST_JOINED = 64

TokenBytes = bytes | bytearray
"""Tokens as native int32 bytes, which are sliced, hashed and compared at memcmp speed."""


class RadixTree:
    """The token paths by namespace. Each node, a segment, is a run of blocks.

    The tree adds, divides and removes segments; the pools interpret their state.

    Attributes:
        roots: the root of each namespace with published blocks; only the tree changes it.
        index: finds segments by block key; ``None`` until it is needed.
        on_split: called with the upper and the lower part of every divided segment, before `split`
            returns.
        on_join: called with the upper of two joined segments, which is removed.
    """

    def __init__(self, tokens_per_block: int, num_pools: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.stride = 4 * tokens_per_block
        self.index: KeyIndex | None = None
        self.on_split: list[Callable[[Segment, Segment], None]] = []
        self.on_join: list[Callable[[Segment], None]] = []
        self._num_pools = num_pools
        self.roots: dict[NamespaceId, Root] = {}

    def root(self, namespace: NamespaceId, chain_root: BlockKey | None = None) -> Root:
        """Returns the root of `namespace`; makes one if there is none.

        A root is removed with its last child. The first `chain_root` that is passed becomes the key
        before the namespace's first blocks.
        """
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace, self._num_pools)
        if root.chain_root is None and chain_root is not None:
            root.chain_root = chain_root
            if self.index is not None:
                self.index.named(root)
        return root

    def segments(self) -> Iterator[Segment]:
        """Yields all segments, parents before children; the tree must not change meanwhile."""
        waiting: list[Segment] = []
        for root in self.roots.values():
            waiting.extend(root.children.values())
        while waiting:
            segment = waiting.pop()
            yield segment
            waiting.extend(segment.children.values())

    def clear(self) -> None:
        """Removes all segments and roots, and empties the key index."""
        self.roots.clear()
        if self.index is not None:
            self.index = KeyIndex((), self.tokens_per_block)

    # ---------------------------------------------------------------- queries, which change nothing

    def walk(self, segment: Segment, tokens: TokenBytes, stop: int) -> tuple[Segment, int]:
        """Follows whole blocks of `tokens` from the end of `segment` down to block `stop`.

        Returns the deepest segment reached, and the number of matching blocks from the root on.
        `tokens` are those of the whole path.
        """
        stride = self.stride
        at = segment.end
        while at < stop:
            child = segment.children.get(bytes(tokens[at * stride : (at + 1) * stride]))
            if child is None:
                break
            segment = child
            end = child.end
            if end == at + 1 or (end <= stop and tokens.startswith(child.tokens, at * stride)):
                at = end
                continue
            at += self._common(tokens, at, child.tokens, min(end, stop) - at)
            break
        return segment, at

    def nearest(self, root: Root, tokens: TokenBytes) -> tuple[int, bytes]:
        """Returns how many whole blocks of `tokens` are in the tree, and the block that is next.

        If several follow, it returns the one that shares most tokens with `tokens`; empty bytes if
        there is none.
        """
        stride = self.stride
        segment, at = self.walk(root, tokens, len(tokens) // stride)
        if at < segment.end:
            low = (at - segment.start) * stride
            return at, bytes(segment.tokens[low : low + stride])
        rest = bytes(tokens[at * stride : (at + 1) * stride])
        beside = segment.children.beside(rest, rest)
        return at, max(beside, key=lambda key: (shared_tokens(rest, key), len(key)))

    def step(self, segment: Segment, tokens: TokenBytes, stop: int) -> tuple[Segment, int] | None:
        """Walks like `walk`, but into one child only; returns ``None`` if no child matches."""
        at, stride = segment.end, self.stride
        child = segment.children.get(bytes(tokens[at * stride : (at + 1) * stride]))
        if child is None:
            return None
        count = min(child.end, stop) - at
        return child, at + (self._common(tokens, at, child.tokens, count) if count > 1 else 1)

    def followers(self, segment: Segment, at: int, prefix: TokenBytes) -> Iterator[Segment]:
        """Yields the segments whose block number `at` on this path begins with `prefix`.

        That is `segment` itself, or children of `segment` if it ends before the block.
        """
        if at < segment.end:
            if segment.tokens.startswith(prefix, (at - segment.start) * self.stride):
                yield segment
        else:
            yield from segment.children.begun_by(bytes(prefix))

    def _common(self, tokens: TokenBytes, at: int, other: bytearray, count: int) -> int:
        # The whole blocks that `tokens` from block `at` on share with the first `count` of `other`.
        size = count * self.tokens_per_block
        left = np.frombuffer(tokens, np.int32, size, at * self.stride)
        differs = left != np.frombuffer(other, np.int32, size)
        first = int(differs.argmax())
        return first // self.tokens_per_block if differs[first] else count

    # ---------------------------------------------------------------- changes

    def insert(
        self, parent: Segment, tokens: bytearray, num_blocks: int, chain: KeyChain | None = None
    ) -> Segment:
        """Adds a segment of `num_blocks` blocks after `parent` and returns it.

        `parent` must have no child that begins with the same block. The segment is in no pool yet.
        Keys that `chain` has are not hashed again.
        """
        segment = Segment(parent, parent.end, parent.end + num_blocks, tokens, self._num_pools)
        parent.add_child(bytes(tokens[: self.stride]), segment)
        if self.index is not None:
            self.index.added(segment, chain)
        return segment

    def lengthen(
        self, segment: Segment, tokens: bytearray, num_blocks: int, chain: KeyChain | None = None
    ) -> None:
        """Adds `num_blocks` blocks with `tokens` at the end of `segment`, which has no children."""
        segment.tokens += tokens
        segment.end += num_blocks
        if self.index is not None and chain is not None:
            self.index.take(segment, chain)

    def shorten(self, segment: Segment, num_blocks: int) -> None:
        """Removes the last `num_blocks` blocks of a longer segment without children.

        No pool may have these blocks.
        """
        segment.end -= num_blocks
        keep = segment.end - segment.start
        del segment.tokens[keep * self.stride :], segment.keys[keep * KEY_NBYTES :]

    def let_go(self, segment: Segment) -> None:
        """Records that `segment` was released, or used, just now in group 0."""
        parent = segment.parent
        if parent is not None and parent.children.recent is not None:
            parent.children.let_go(bytes(segment.tokens[: self.stride]))

    def split(self, segment: Segment, at: int) -> Segment:
        """Divides `segment` before block number `at`; returns the upper part, a new segment.

        Both parts have the state of the whole. `segment` becomes the lower part.
        """
        count = at - segment.start
        cut = count * self.stride
        # The lower part is mostly short, so it is copied, and the upper one keeps the memory.
        upper = Segment(segment.parent, segment.start, at, segment.tokens, 0)
        upper.pools = list(segment.pools)  # replaced by the pools' own parts, below
        upper.keys = segment.keys
        if segment.parent is not None:
            segment.parent.children[bytes(segment.tokens[: self.stride])] = upper
        segment.parent, segment.start = upper, at
        segment.tokens = upper.tokens[cut:]
        segment.keys = upper.keys[count * KEY_NBYTES :]
        del upper.tokens[cut:], upper.keys[count * KEY_NBYTES :]
        upper.add_child(bytes(segment.tokens[: self.stride]), segment)
        for divided in self.on_split:
            divided(upper, segment)
        if self.index is not None:
            self.index.divided(upper, segment)
        return upper

    def join(self, upper: Segment, *, same_holders: bool = False) -> None:
        """Joins `upper` and its only child if possible, as the reverse of `split`.

        They are joined if they have no holder, or the caller knows that they have the same holders,
        none of which ends between them. Every pool must have them in the same state. Together they
        must be short (64 blocks), as both are copied. The child becomes the joined segment.
        """
        lower = next(iter(upper.children.values()), None)
        if lower is None or len(upper.children) > 1 or upper.parent is None:
            return
        if len(upper) + len(lower) > _LONGEST_JOINED or len(lower.tokens) < self.stride:
            return
        for above, below in zip(upper.pools, lower.pools, strict=True):
            if not above.goes_on_as(below) or (above.references and not same_holders):
                return
        if self.index is not None:
            self.index.joining(upper, lower)
        for above, below in zip(upper.pools, lower.pools, strict=True):
            below.absorb(above)
        lower.tokens = upper.tokens + lower.tokens
        lower.keys = upper.keys + lower.keys
        lower.start, lower.parent = upper.start, upper.parent
        upper.parent.children[bytes(upper.tokens[: self.stride])] = lower
        for absorbed in self.on_join:
            absorbed(upper)

    def last_blocks(self, segment: Segment, count: int) -> Segment:
        """Splits `segment` so that it has only its last `count` blocks; returns `segment`."""
        if count < len(segment):
            self.split(segment, segment.end - count)
        return segment

    def descend(self, segment: Segment, tokens: TokenBytes, stop: int) -> Segment:
        """Returns the segment below `segment` that ends after `stop` blocks of `tokens`.

        Splits or adds a segment if there is none.
        """
        if segment.end == stop:
            return segment
        return self.arrive(*self.walk(segment, tokens, stop), tokens, stop)

    def arrive(self, segment: Segment, at: int, tokens: TokenBytes, stop: int) -> Segment:
        """Completes `descend`: `segment` and `at` are the result of a `walk` to `stop`."""
        if at < segment.end:
            segment = self.split(segment, at)
        if at < stop:
            between = bytearray(tokens[at * self.stride : stop * self.stride])
            segment = self.insert(segment, between, stop - at)
        return segment

    def prune(self, segment: Segment) -> None:
        """Removes `segment` if it has no children and is in no pool; then its ancestors alike."""
        while not segment.children and not segment.is_resident:
            parent = segment.parent
            if parent is None:
                if isinstance(segment, Root):
                    self.roots.pop(segment.namespace, None)
                return
            if self.index is not None:
                self.index.removed(segment)
            parent.children.remove(bytes(segment.tokens[: self.stride]))
            segment = parent


def shared_tokens(left: bytes, right: bytes) -> int:
    """Returns how many leading tokens of `left` and `right`, native int32 bytes, are equal."""
    if left[:4] != right[:4]:
        return 0  # the usual case
    size = min(len(left), len(right))
    differing = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    lowest = differing & -differing
    return (lowest.bit_length() - 1) // 32 if differing else size // 4
