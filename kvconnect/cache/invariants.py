"""Recounts the state of a block manager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvconnect.cache.block_pool import BlockPool
from kvconnect.cache.radix_tree import RadixTree
from kvconnect.cache.segment import Root, Segment
from kvconnect.cache.sequence import PinHandle, Sequence

__all__ = ["check_invariants"]


def check_invariants(
    tree: RadixTree,
    pool: BlockPool,
    sequences: Collection[Sequence],
    pins: Collection[PinHandle],
    tokens_per_block: int,
) -> None:
    """Recount everything, at a cost proportional to everything.

    Raises:
        AssertionError: names the broken invariant.
    """
    segments = _segments(tree)
    for segment in segments:
        _check_segment(segment, 4 * tokens_per_block)
    _check_references(segments, sequences, pins)
    for sequence in sequences:
        _check_sequence(sequence, tokens_per_block)
    _check_blocks(segments, pool, sequences, pins)
    _check_queue(segments, pool)
    if tree.index is not None:
        tree.index.check(segments)


def _require(holds: bool, broken: str) -> None:  # noqa: FBT001 - it reads like assert
    if not holds:
        raise AssertionError(broken)


def _segments(tree: RadixTree) -> list[Segment]:
    segments: list[Segment] = []
    for namespace, root in tree.roots.items():
        _require(root.namespace == namespace, "a root is filed under its namespace")
        _require(len(root.children) > 0, "a namespace without published blocks has no root")
        waiting: list[Segment] = list(root.children)
        while waiting:
            segment = waiting.pop()
            segments.append(segment)
            waiting.extend(segment.children)
    return segments


def _check_segment(segment: Segment, stride: int) -> None:
    parent = segment.parent
    if parent is None:
        raise AssertionError("only a root has no parent")
    key = bytes(segment.tokens[:stride])
    is_tail = len(segment.tokens) < stride
    _require(parent.children.get(key) is segment, "a parent finds its child by its first block")
    _require(parent.end == segment.start, "a segment starts where its parent ends")
    _require(len(segment.ids) > 0, "no segment is empty")
    whole = len(segment.tokens) == len(segment.ids) * stride
    _require(whole or (is_tail and len(segment.ids) == 1), "a segment has the tokens of its blocks")
    _require(not is_tail or not segment.children, "a tail has no children")
    keys = segment.children.keys
    _require(keys == sorted(set(keys)), "children are in order and apart")
    above = isinstance(parent, Root) or parent.references >= segment.references
    _require(above, "whoever holds a block holds those before it")
    let_go = segment.references > 0 or segment.stamp > 0
    _require(let_go, "an unreferenced block was let go at some moment")


def _check_references(
    segments: list[Segment], sequences: Collection[Sequence], pins: Collection[PinHandle]
) -> None:
    held: Counter[int] = Counter()
    for deepest in (*(s.segment for s in sequences), *(p.segment for p in pins)):
        step = deepest
        while step is not None and step.parent is not None:
            held[id(step)] += 1
            step = step.parent
    for segment in segments:
        count = held.pop(id(segment), 0)
        _require(segment.references == count, "references count the sequences and pins")
    _require(not held, "nobody holds a segment that is not in the tree")


def _check_sequence(sequence: Sequence, tokens_per_block: int) -> None:
    num_blocks = -(-sequence.num_tokens // tokens_per_block)
    _require(len(sequence.ids) == num_blocks, "a sequence has the blocks that its tokens need")
    path = [] if sequence.segment is None else sequence.segment.path()
    ids = [block for step in path for block in step.ids]
    tokens = b"".join(step.tokens for step in path)
    _require(len(ids) == sequence.published, "a sequence's path has its published blocks")
    _require(ids == list(sequence.ids[: len(ids)]), "a sequence's path has its ids")
    _require(sequence.tokens.startswith(tokens), "a sequence's path has its tokens")
    _require(
        sequence.matched <= sequence.computed <= sequence.num_tokens,
        "a sequence computed no more tokens than it has, and no less than it matched",
    )


def _check_blocks(
    segments: list[Segment],
    pool: BlockPool,
    sequences: Collection[Sequence],
    pins: Collection[PinHandle],
) -> None:
    blank = list(pool.blank)
    published = [block for segment in segments for block in segment.ids]
    private = [block for sequence in sequences for block in sequence.ids[sequence.published :]]
    loose = {block for pin in pins for block in pin.loose}
    _require(len(set(private)) == len(private), "a private block belongs to one sequence")
    _require(not loose & set(private), "what a pin holds alone belongs to no sequence")
    everything = Counter(blank) + Counter(published) + Counter(private) + Counter(loose)
    expected = Counter(range(pool.num_blocks))
    _require(everything == expected, "every block is blank, published or private, and only one")
    unreferenced = sum(len(segment.ids) for segment in segments if segment.references == 0)
    _require(pool.num_unreferenced == unreferenced, "unreferenced blocks are counted")
    _check_holders(pool, sequences, pins)


def _check_holders(
    pool: BlockPool, sequences: Collection[Sequence], pins: Collection[PinHandle]
) -> None:
    holders = Counter(block for pin in pins for block in pin.loose)
    for sequence in sequences:
        holders.update(sequence.ids[sequence.published :])
        for pin in sequence.pins:
            _require(pin in pins, "a sequence knows only live pins")
            holders.update(sequence.ids[sequence.published : pin.end])
    for block, count in holders.items():
        _require(pool.num_holders(block) == count, "holders of private blocks are counted")


def _check_queue(segments: list[Segment], pool: BlockPool) -> None:
    candidates = [s for s in segments if s.references == 0 and not s.children]
    _require(all(s.ticket for s in candidates), "every unreferenced leaf can be reclaimed")
    tickets = sum(1 for s in segments if s.ticket)
    _require(tickets == len(candidates) == len(pool.queue), "nothing else can be reclaimed")
