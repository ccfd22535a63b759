"""The runs of blocks that are loaded together, for engines that load without a request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvconnect.connector.io.load import Load, Loads
from kvconnect.connector.io.orders import BlockLoad, LoadBlocks


class RunLoads:
    """A load of several runs of blocks; each ends at the first block that cannot be loaded.

    Args:
        loads: starts the loads, on any thread.
        runs: the runs, each with its blocks in order.
        done: called with `valid` when all have ended, as `Load.done`; at once if no block is to be
            loaded.

    Attributes:
        valid: the number of loaded leading blocks of each run; 0 until the run has ended.
    """

    def __init__(
        self,
        loads: Loads,
        runs: Sequence[Sequence[BlockLoad]],
        done: Callable[[Sequence[int]], None],
    ) -> None:
        self.valid = [0] * len(runs)
        self._done = done
        wanted = [(number, tuple(blocks)) for number, blocks in enumerate(runs) if blocks]
        self._left = len(wanted)
        self._ending = threading.Lock()
        size = loads.tokens_per_block
        self._loads = [
            loads.start(LoadBlocks(number, 0, len(blocks) * size, blocks), self._ended)
            for number, blocks in wanted
        ]
        if not wanted:
            done(self.valid)

    def abandon(self) -> None:
        """Stops further copies, even if the loop does not run. On any thread."""
        for load in self._loads:
            load.closed = True

    def _ended(self, load: Load) -> None:
        if not load.cancelled:
            self.valid[load.order.request_id] = load.num_valid_blocks()
        with self._ending:
            self._left -= 1
            last = not self._left
        if last:
            self._done(self.valid)
