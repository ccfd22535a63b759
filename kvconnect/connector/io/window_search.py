"""Finds the end of a hit at which groups with a window, and states, have what they need."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout

_STATES_AT_ONCE = 32
"""The number of blocks that are searched for a snapshot of states at one time."""


class WindowSearch:
    """Finds the end of a hit at which each group with a window has every block it needs.

    Args:
        leading: returns how many leading keys, blocks of a group from a number on, are stored.
        has_states: returns whether all groups of states have the block of a key.
        path: keys of the blocks that a hit may use.
        layouts: the layouts of the pool groups.
        state_interval: the tokens between two snapshots that are searched far before the end;
            ``None``: every block is searched.

    Attributes:
        reach: where the hit would end if the states were at every end; 0 without states.
    """

    def __init__(
        self,
        leading: Callable[[int, Sequence[BlockKey], int], Awaitable[int]],
        has_states: Callable[[BlockKey], Awaitable[bool]],
        path: Sequence[BlockKey],
        *,
        layouts: Sequence[KvCacheLayout],
        state_interval: int | None,
    ) -> None:
        self._leading = leading
        self._has_states = has_states
        self._path = path
        self._size = layouts[0].tokens_per_block
        self._interval = state_interval or self._size
        # One of the groups of states stands for all of them; it is the last one to be searched.
        states = [group for group, layout in enumerate(layouts) if layout.kind == "state"]
        self._states = max(states, default=None)
        self._windows = {
            group: layout.window
            for group, layout in enumerate(layouts)
            if layout.window is not None and (layout.kind != "state" or group == self._states)
        }
        # From this block on, up to where the hit ends, the group has every block.
        self._known = dict.fromkeys(self._windows, len(path))
        self.reach = 0

    async def step_back(self, end: int, most_steps: int) -> int:
        """Returns the largest end of a hit up to `end`; after `most_steps`, a smaller one."""
        steps = 0
        settled: set[int] = set()
        while end and len(settled) < len(self._windows) and steps <= most_steps:
            for group in self._windows:
                if group in settled:
                    continue
                reached = await self._reach(group, end)
                if reached < end:
                    # The other groups were checked for another end.
                    end, settled = reached, set()
                    steps += 1
                    break
                settled.add(group)
        if len(settled) < len(self._windows):
            end = await self._from_the_first(end)
        return end

    async def _reach(self, group: int, end: int) -> int:
        """Returns `end` if the group has the blocks needed there, else its first missing token."""
        if group == self._states:
            self.reach = self.reach or end
            return await self._last_state(end)
        size = self._size
        needed = blocks_needed(self._windows[group], end, size)
        unknown = range(needed.start, min(needed.stop, self._known[group]))
        if not unknown:
            return end
        present = await self._present(group, unknown)
        self._known[group] = unknown.start
        return end if present == len(unknown) else (unknown.start + present) * size

    async def _last_state(self, end: int) -> int:
        """Returns the last position up to `end` with a snapshot of the states, or 0.

        Most prompts have a snapshot at `end`. Otherwise each block is looked up by itself, since
        only few blocks have snapshots: the blocks right before `end`, and then those at whose ends
        an engine takes snapshots in any case. So other snapshots far before `end` are not found.
        """
        for numbers in self._searched(end // self._size):
            present = await asyncio.gather(
                *(self._has_states(self._path[number]) for number in numbers)
            )
            found = [number for number, there in zip(numbers, present, strict=True) if there]
            if found:
                return (found[-1] + 1) * self._size
        return 0

    def _searched(self, stop: int) -> Iterator[range]:
        """Yields the blocks before `stop` to search for a snapshot, in ascending runs, last first.

        Snapshots are at the ends of the blocks.
        """
        if stop:
            yield range(stop - 1, stop)
        near = max(0, stop - 1 - _STATES_AT_ONCE)
        yield range(near, max(0, stop - 1))
        step = max(1, self._interval // self._size)
        far = range(step - 1, near, step)
        for last in range(len(far), 0, -_STATES_AT_ONCE):
            yield far[max(0, last - _STATES_AT_ONCE) : last]

    async def _from_the_first(self, end: int) -> int:
        """Returns an end at which every group has what it needs.

        There, groups with a window have every block from the first one on.
        """
        size = self._size
        for group in self._windows.keys() - {self._states}:
            blocks = range(-(-end // size))
            present = await self._present(group, blocks)
            if present < len(blocks):
                end = present * size
        return end if self._states is None else await self._last_state(end)

    async def _present(self, group: int, blocks: range) -> int:
        if not blocks:
            return 0
        keys = [self._path[number] for number in blocks]
        return await self._leading(group, keys, blocks.start)


def blocks_needed(window: int | None, end: int, tokens_per_block: int) -> range:
    """Returns the numbers of the blocks that computing tokens from `end` on needs.

    With full attention (`window` is ``None``) every block of ``[0, end)``; else those that overlap
    ``[end - window + 1, end)``, and the one that `end` is inside of. After a commit of `end` tokens
    a running sequence holds no block before these.
    """
    first = 0 if window is None else max(0, end - window + 1) // tokens_per_block
    return range(first, -(-end // tokens_per_block))
