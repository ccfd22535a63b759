"""The blocks of a request that are not yet saved to the store."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from kvconnect.connector.io.lookup import blocks_needed
from kvconnect.connector.io.orders import BlockRun, BlockSave, SaveOrder
from kvconnect.connector.pair.hooks import GuardedHooks
from kvconnect.explain.outcome import NotSaved
from kvconnect.keys import BlockKey
from kvconnect.request import LlmRequest

_LONGEST_TTL_S = 1e11  # three thousand years


class _Group:
    """The blocks of a request in one pool group.

    Attributes:
        window: attention window; ``None`` for full attention.
        is_state: the blocks are snapshots of states. The request holds the last one at most.
        block_ids: the reported block ids; -1 where the request held no block at that time.
        num_done: leading full blocks that need no save: stored, being saved, or freed by the
            window; ``None``: not known yet.
    """

    __slots__ = ("block_ids", "is_state", "num_done", "window")

    def __init__(self, window: int | None, *, is_state: bool = False) -> None:
        self.window = window
        self.is_state = is_state
        self.block_ids: list[int] = []
        self.num_done: int | None = None


class SavePlan:
    """The blocks that a request holds, and how many of them are stored or being saved.

    A store finds a block through the one before it. So a block that is not stored ends the plan, in
    all pool groups: a block that is refused, or below `min_priority`, for good, a dropped block
    until the request ends.
    Blocks that a window has freed belong to other requests and are never read; the window's later
    blocks are of use without them.

    A snapshot of states is as large as many blocks, and the request's next snapshot frees it. Those
    in the prompt and those at a multiple of `state_interval` are saved in the step that takes them;
    of the others in the answer, which are at the end of each block, only the last one is saved.

    Args:
        request: the request that holds the blocks.
        min_priority: the least priority of blocks that are saved.
        windows: attention window of each pool group, ``None`` for full attention.
        hooks: also decide which blocks are saved, and their priority; ``None``: there are none.
        states: the groups whose blocks are snapshots of states.
        state_interval: in tokens.

    Attributes:
        request: the request.
        num_held: the number of ordered blocks that workers hold until the request's end.
        load_end: the end of the load beside which the request computes; 0: there was none. Once
            these tokens are committed, no snapshot before that end is held any more.
    """

    __slots__ = (
        *("_groups", "_hooks", "_judged", "_min_priority", "_open", "_priorities"),
        *("_state_interval", "_stored_tail"),
        *("load_end", "num_held", "request"),
    )

    def __init__(
        self,
        request: LlmRequest,
        *,
        min_priority: int = 0,
        windows: Sequence[int | None] = (None,),
        hooks: GuardedHooks | None = None,
        states: Collection[int] = (),
        state_interval: int = 1,
    ) -> None:
        self.request = request
        self.num_held = 0
        self.load_end = 0
        self._min_priority = min_priority
        self._hooks = hooks if hooks is not None and hooks.judges else None
        self._judged: dict[int, NotSaved | None] = {}  # by the hooks: blocks by their number
        self._groups = [
            _Group(window, is_state=group in states) for group, window in enumerate(windows)
        ]
        self._state_interval = state_interval
        self._priorities: list[int] = []
        self._open = True
        self._stored_tail: BlockKey | None = None

    @property
    def num_blocks(self) -> int:
        """The number of reported blocks of the request in group 0."""
        return len(self._groups[0].block_ids)

    @property
    def knows_store(self) -> bool:
        """Returns whether `note_stored` was called."""
        return all(group.num_done is not None for group in self._groups)

    def extend(self, by_group: Sequence[Sequence[int]], priorities: Sequence[int]) -> None:
        """Appends the blocks that were allocated for the request since the last call.

        Args:
            by_group: block ids of each pool group, in the order of `windows`; -1: no block.
            priorities: the retention priority of each block in ``by_group[0]``.
        """
        for group, block_ids in zip(self._groups, by_group, strict=True):
            if group.is_state and block_ids and group.block_ids:
                group.block_ids[-1] = -1  # freed by this snapshot
            group.block_ids += block_ids
        self._priorities += priorities

    def hold(self, block_ids: Sequence[int]) -> bool:
        """Records that the request holds exactly `block_ids` in group 0, without unreported ones.

        Returns:
            True if a rewind removed a saved block, or tokens of one.
        """
        del self._priorities[len(block_ids) :]
        first = self._groups[0]
        # Ids of a window's freed blocks stay as they were reported: see `_held`.
        if first.window is None:
            first.block_ids = list(block_ids[: len(self._priorities)])
        num_full = self.request.num_tokens // self.request.key_chain.tokens_per_block
        self._judged = {at: why for at, why in self._judged.items() if at < num_full}
        rewound = any((group.num_done or 0) > num_full for group in self._groups)
        for group in self._groups:
            del group.block_ids[len(block_ids) :]
            if group.num_done is not None:
                group.num_done = min(group.num_done, num_full)
        return rewound

    def forget_blocks(self) -> None:
        """Removes all blocks, because the request has new ones that will be reported."""
        for group in self._groups:
            group.block_ids.clear()
        self._priorities.clear()
        self._judged.clear()

    def forget_group(self, number: int) -> None:
        """Removes the ids of the blocks of pool group `number`, which now hold other content."""
        group = self._groups[number]
        group.block_ids = [-1] * len(group.block_ids)

    def note_stored(self, num_stored: Sequence[int], tail: BlockKey | None = None) -> None:
        """Records the stored leading blocks of each group, and a stored block `tail` after them."""
        for number, group in enumerate(self._groups):
            stored = num_stored[number] if number < len(num_stored) else 0
            group.num_done = max(group.num_done or 0, stored)
        self._stored_tail = tail

    def note_missing(self, block: int, *, until_end: bool = False) -> None:
        """Records that block number `block` did not reach the store, or cannot be loaded from it.

        With `until_end` no more blocks are due until the request ends, which orders the rest.
        """
        for group in self._groups:
            if group.num_done is not None:
                group.num_done = min(group.num_done, block)
        self._stored_tail = None
        self._open = self._open and not until_end

    def is_due(self, num_full: int) -> bool:
        """Returns whether one of the first `num_full` blocks may need a save; fast if none does."""
        return self._open and any(
            self._is_due(group, min(len(group.block_ids), num_full))
            if group.is_state
            else group.num_done is None or num_full > group.num_done
            for group in self._groups
        )

    def _is_due(
        self, states: _Group, stop: int, *, num_committed: int = 0, ends: bool = False
    ) -> bool:
        """Returns whether the request has a snapshot behind `stop` blocks that is to be saved.

        `num_committed` tokens were committed; `ends`: the request has ended.
        """
        if stop <= (states.num_done or 0) or states.block_ids[stop - 1] < 0:
            return False
        end = stop * self.request.key_chain.tokens_per_block
        if end < self.load_end <= num_committed:
            return False  # another request may have its block by now
        return ends or end <= self.request.prompt_len or end % self._state_interval == 0

    def _is_found(self, stop: int) -> bool:
        """Returns whether the store finds the end of `stop` blocks, as far as is known."""
        return all(
            group.is_state or group.num_done is None or group.num_done >= stop
            for group in self._groups
        )

    def order(
        self,
        num_full: int,
        num_committed: int,
        tail_end: int | None = None,
        *,
        ends: bool = False,
    ) -> SaveOrder | None:
        """Returns the blocks to save of the first `num_full` and, with `tail_end`, of their tail.

        Ordered blocks count as stored from now on. A group with full attention has no orders until
        the store's content is known. A group with a window does not wait, as it may lose its blocks
        before.

        Args:
            num_full: blocks that will be full of valid KV.
            num_committed: tokens that were last committed; windows hold no block wholly before
                what they cover there.
            tail_end: tokens that will be valid, inside of block number `num_full`.
            ends: the request has ended.
        """
        runs: list[BlockRun] = []
        for number, group in enumerate(self._groups):
            if group.num_done is None and group.window is None:
                continue
            first = group.num_done or 0
            known = min(len(group.block_ids), len(self._priorities), num_full)
            if group.is_state:
                due = self._is_due(group, known, num_committed=num_committed, ends=ends)
                if not (due and self._is_found(known)):
                    continue
                first = known - 1  # it holds none before
            stop = self._first_unwanted(first, known)
            runs += [
                self._full_blocks(held, number)
                for held in self._held(group, first, stop, num_committed)
            ]
            group.num_done = max(first, stop)
        blocks: Sequence[BlockSave] = (
            runs[0] if len(runs) == 1 else tuple(block for run in runs for block in run)
        )
        if len(self._groups) > 1:
            # A stable sort: of equal blocks group 0 is first.
            blocks = sorted(blocks, key=lambda block: block.number)
        if tail_end is not None and self._wants_tail(num_full, tail_end):
            tails = (self._tail(num_full, tail_end, group) for group in range(len(self._groups)))
            blocks = (*blocks, *tails)
        # One key has no more blocks than there are groups.
        if len(blocks) <= len(self._groups) and all(
            block.key == self._stored_tail for block in blocks
        ):
            return None
        request, ttl_s = self.request, self.request.cache.ttl
        expires_at = None if ttl_s is None else time.time() + min(ttl_s, _LONGEST_TTL_S)
        return SaveOrder(request.request_id, blocks, request.namespace.tag(), expires_at)

    def _held(self, group: _Group, first: int, stop: int, num_committed: int) -> list[range]:
        """Returns the ranges in ``first..stop`` of blocks that are still the request's."""
        if group.window is not None and not group.is_state:
            size = self.request.key_chain.tokens_per_block
            first = max(first, blocks_needed(group.window, num_committed, size).start)
        if group.window is None or min(group.block_ids[first:stop], default=0) >= 0:
            return [range(first, stop)] if first < stop else []
        return [range(n, n + 1) for n in range(first, stop) if group.block_ids[n] >= 0]

    def _first_unwanted(self, first: int, stop: int) -> int:
        """Returns the first of the full blocks ``first..stop`` that is not to be saved."""
        if (
            self._hooks is None
            and self.request.cache.save
            and min(self._priorities[first:stop], default=self._min_priority) >= self._min_priority
        ):
            return stop
        for number in range(first, stop):
            if (why := self._refusal(number)) is not None:
                self._note_refused(number, why)
                return number
        return stop

    def _refusal(self, number: int) -> NotSaved | None:
        """Returns why the full block `number` is not to be saved; ``None``: it is."""
        if not self.request.cache.save:
            return NotSaved.REQUEST
        if self._hooks is None:
            below = self._priorities[number] < self._min_priority
            return NotSaved.BELOW_MIN_PRIORITY if below else None
        if number not in self._judged:
            chain, size = self.request.key_chain, self.request.key_chain.tokens_per_block
            (key,) = chain.keys(number, number + 1)
            self._judged[number] = self._judge(key, number, (number + 1) * size)
        return self._judged[number]

    def _judge(self, key: BlockKey, number: int, end: int) -> NotSaved | None:
        """Asks the hooks about the block `number`, which ends at token `end`; may rank it anew."""
        if self._hooks is None:
            return None
        verdict = self._hooks.judged(self.request, self._block(key, number, end, 0))
        if isinstance(verdict, NotSaved):
            return verdict
        self._priorities[number] = verdict
        return None

    def _note_refused(self, number: int, why: NotSaved) -> None:
        if self.knows_store:  # else groups that wait for that have earlier blocks to save
            self._open = False
        self.request.account.not_saved(number * self.request.key_chain.tokens_per_block, why)

    def _wants_tail(self, number: int, end: int) -> bool:
        if not all(
            group.num_done == number < len(group.block_ids) and group.block_ids[number] >= 0
            for group in self._groups
        ):
            return False
        if self._hooks is None or not self.request.cache.save:
            why = self._refusal(number)
        elif (key := self.request.key_chain.tail(end)) == self._stored_tail:
            why = None
        else:
            why = self._judge(key, number, end)
        if why is not None:
            self._note_refused(number, why)
        return why is None

    def _full_blocks(self, numbers: range, group: int) -> BlockRun:
        chain, first, stop = self.request.key_chain, numbers.start, numbers.stop
        size = chain.tokens_per_block
        return BlockRun(
            chain.digests(first, stop),
            first,
            self._groups[group].block_ids[first:stop],
            self.request.tokens.view[first * size : stop * size].copy(),
            self._priorities[first:stop],
            group,
        )

    def _tail(self, number: int, end: int, group: int) -> BlockSave:
        return self._block(self.request.key_chain.tail(end), number, end, group)

    def _block(self, key: BlockKey, number: int, end: int, group: int) -> BlockSave:
        """Returns the block `number`, full or a tail, whose last token is before `end`."""
        chain, ids = self.request.key_chain, self._groups[group].block_ids
        return BlockSave(
            key,
            chain.parent(number),
            number,
            ids[number] if number < len(ids) else -1,
            self.request.tokens.view[number * chain.tokens_per_block : end].copy(),
            self._priorities[number],
            group,
        )
