"""Recounts the state of a block manager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items

from kvconnect.cache.pool.block_pool import BlockPool
from kvconnect.cache.pool.held_blocks import NOT_HELD, HeldBlocks, HeldPath
from kvconnect.cache.sequence.sequence import PinHandle, Sequence
from kvconnect.cache.tree.radix_tree import RadixTree
from kvconnect.cache.tree.segment import Root, Segment


def check_invariants(
    tree: RadixTree,
    pools: Items[BlockPool],
    sequences: Collection[Sequence],
    pins: Collection[PinHandle],
) -> None:
    """Recounts all state of a block manager; the cost is proportional to the state's size.

    Raises:
        AssertionError: an invariant is broken; the message names it.
    """
    segments = list(tree.segments())
    for namespace, root in tree.roots.items():
        _require(root.namespace == namespace, "a root is filed under its namespace")
        _require(len(root.children) > 0, "a namespace without published blocks has no root")
        _check_children(root)
    for segment in segments:
        _check_path(segment, tree.stride)
        _check_children(segment)
    for pool in pools:
        for segment in segments:
            _check_residence(segment, pool)
        _check_references(segments, pool, sequences, pins)
        for sequence in sequences:
            _check_held(sequence, pool, tree)
        _check_blocks(segments, pool, sequences, pins)
        _check_candidates(segments, pool)
        _check_host(segments, pool)
    for sequence in sequences:
        _check_positions(sequence, tree)
    if tree.index is not None:
        tree.index.check(segments)


def _require(holds: bool, broken: str) -> None:  # noqa: FBT001 - it reads like assert
    if not holds:
        raise AssertionError(broken)


def _check_path(segment: Segment, stride: int) -> None:
    parent = segment.parent
    if parent is None:
        raise AssertionError("only a root has no parent")
    key = bytes(segment.tokens[:stride])
    is_tail = len(segment.tokens) < stride
    _require(parent.children.get(key) is segment, "a parent finds its child by its first block")
    _require(parent.end == segment.start, "a segment starts where its parent ends")
    _require(len(segment) > 0, "no segment is empty")
    whole = len(segment.tokens) == len(segment) * stride
    _require(whole or (is_tail and len(segment) == 1), "a segment has the tokens of its blocks")
    _require(not is_tail or not segment.children, "a tail has no children")
    resident = segment.is_resident
    _require(resident or len(segment.children) > 0, "a leaf is resident in some pool")


def _check_children(segment: Segment) -> None:
    children = segment.children
    in_order = children.order is None or list(children.order) == sorted(children)
    _require(in_order, "children are in order, each once")
    if children.recent is not None:
        _require(children.recent.keys() == children.keys(), "recency is of the children")
        stamps = [children[key].pools[0].stamp for key in children.recent]
        released = [stamp for stamp in stamps if stamp > 0]
        _require(released == sorted(released), "children that were let go last are last")


def _check_residence(segment: Segment, pool: BlockPool) -> None:
    state = segment.pools[pool.group]
    for ids in (state.ids, state.host_ids):
        _require(ids is None or len(ids) == len(segment), "a segment has an id for every block")
    below = [child.pools[pool.group] for child in segment.children.values()]
    primary = sum(child.ids is not None for child in below)
    resident = sum(child.is_resident for child in below)
    _require(state.primary_below == primary, "children in primary are counted")
    _require(state.resident_below == resident, "resident children are counted")
    if not state.is_resident:
        _require(state.references == 0, "what is not there has no holder")
    else:
        released = state.references > 0 or state.stamp > 0
        _require(released, "an unreferenced block was let go at some moment")
    parent = segment.parent
    if pool.window is None and parent is not None and not isinstance(parent, Root):
        above = parent.pools[pool.group]
        _require(above.is_resident or not state.is_resident, "what is before a block is resident")
        _require(above.ids is not None or state.ids is None, "primary is before secondary")
        _require(above.references >= state.references, "a holder of a block holds those before")


def _check_references(
    segments: list[Segment],
    pool: BlockPool,
    sequences: Collection[Sequence],
    pins: Collection[PinHandle],
) -> None:
    counted: Counter[Segment] = Counter()
    for sequence in sequences:
        counted.update(_referenced(sequence.held[pool.group]))
    for pin in pins:
        counted.update(_referenced(pin.held[pool.group]))
    for segment in segments:
        references = segment.pools[pool.group].references
        _require(references == counted.pop(segment, 0), "references count the sequences and pins")
    _require(not counted, "no segment outside of the tree is held")


def _referenced(held: HeldPath) -> Iterator[Segment]:
    if held.segment is None:
        _require(not held.spans, "what is referenced is on a path")
        return
    found = [step for step in held.segment.path() if held.covers(step.start)]
    _require(held.segment in found, "the deepest segment is referenced")
    count = sum(stop - start for start, stop in held.spans)
    _require(sum(map(len, found)) == count, "spans begin and end where segments do")
    _require(held.spans == sorted(held.spans), "spans are in order")
    yield from found


def _check_held(sequence: Sequence, pool: BlockPool, tree: RadixTree) -> None:
    held = sequence.held[pool.group]
    num_blocks = -(-sequence.num_tokens // tree.tokens_per_block)
    _require(len(held.ids) == num_blocks, "a sequence has the ids that its tokens need")
    numbers = [number for number, block in enumerate(held.ids) if block != NOT_HELD]
    start = -(-sequence.reserved // tree.tokens_per_block)
    missing = held.num_missing() if sequence.load_end and pool.window is not None else 0
    wanted = [*range(held.first, min(start, held.stop)), *range(start + missing, held.stop)]
    wanted = wanted if missing else list(range(held.first, held.stop))
    if pool.is_state and sequence.load_end:
        wanted = [number for number in (held.first, held.stop - 1) if number in numbers]
        wanted = wanted[-len(numbers) :]  # one block twice
    _require(numbers == wanted, "a sequence holds first..stop, but for one gap before a load")
    _require(pool.window is not None or held.first == 0, "full attention gives nothing up")
    most = 2 if sequence.load_end else 1
    few = not pool.is_state or len(numbers) <= most
    _require(few, "a sequence holds one state at most, and one that a load fills")
    for segment in _referenced(held):
        ids = segment.pools[pool.group].ids
        own = held.ids[segment.start : segment.end]
        _require(ids == own, "a sequence's path has its ids")
        low = segment.start * tree.stride
        same = sequence.tokens.startswith(segment.tokens, low)
        _require(same, "a sequence's path has its tokens")


def _check_positions(sequence: Sequence, tree: RadixTree) -> None:
    _require(
        sequence.matched <= sequence.computed <= sequence.reserved <= sequence.num_tokens,
        "a sequence computed no more tokens than it has blocks for, and no less than it matched",
    )
    needed = -(-sequence.reserved // tree.tokens_per_block)
    for held in sequence.held:
        enough = held.pool.is_state or held.stop >= needed
        _require(enough, "there are blocks for what is reserved")


def _check_blocks(
    segments: list[Segment],
    pool: BlockPool,
    sequences: Collection[Sequence],
    pins: Collection[PinHandle],
) -> None:
    states = [segment.pools[pool.group] for segment in segments]
    blank = Counter(pool.private.blank)
    published = Counter(block for state in states for block in state.ids or ())
    private = Counter(b for s in sequences for b in _private(s.held[pool.group]))
    loose = {block for pin in pins for block in pin.held[pool.group].loose}
    _require(max(private.values(), default=1) == 1, "a private block belongs to one sequence")
    _require(not loose & private.keys(), "what a pin holds alone belongs to no sequence")
    everything = blank + published + private + Counter(loose)
    once = max(everything.values(), default=1) == 1
    _require(once, "every block is blank, published or private, and only one")
    _require(everything.total() == pool.num_blocks, "no block is lost")
    unreferenced = sum(len(state.ids or ()) for state in states if state.references == 0)
    _require(pool.published.num_unreferenced == unreferenced, "unreferenced blocks are counted")
    holders = Counter(block for pin in pins for block in pin.held[pool.group].loose)
    for sequence in sequences:
        held = sequence.held[pool.group]
        holders.update(_private(held))
        for pin in sequence.pins:
            _require(pin in pins, "a sequence knows only live pins")
            pinned = pin.held[pool.group]
            holders.update(held.private_ids(pinned.first, pinned.end))
    for block, count in holders.items():
        _require(pool.private.num_holders(block) == count, "holders of private blocks are counted")


def _private(held: HeldBlocks) -> Items[int]:
    return held.private_ids(0, len(held.ids))


def _check_candidates(segments: list[Segment], pool: BlockPool) -> None:
    primary, redundant, sole = set(), set(), set()
    for segment in segments:
        state = segment.pools[pool.group]
        in_window = pool.window is not None
        free = state.references == 0
        if state.ids is not None and free and (in_window or not state.primary_below):
            primary.add(segment)
        if state.host_ids is not None and state.ids is not None:
            redundant.add(segment)
        elif state.host_ids is not None and free and (in_window or not state.resident_below):
            sole.add(segment)
    candidates = pool.published.candidates
    for queue, expected, rule in (
        (candidates.primary, primary, "every candidate can be reclaimed, and nothing else"),
        (candidates.redundant, redundant, "copies of what is in primary can go"),
        (candidates.sole, sole, "what is only in secondary can go, leaf by leaf"),
    ):
        found = {segment for segment in segments if segment in queue}
        _require(found == expected and len(queue) == len(expected), rule)


def _check_host(segments: list[Segment], pool: BlockPool) -> None:
    copies = Counter(b for segment in segments for b in segment.pools[pool.group].host_ids or ())
    ids = Counter(pool.host.blank) + copies
    everything = Counter(range(pool.host.num_blocks))
    _require(ids == everything, "every host block is blank or holds a copy")
