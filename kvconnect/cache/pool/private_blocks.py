"""The unpublished blocks of one pool: blank ones, and private ones with holders."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from kvconnect.cache.tree.segment import BlockIds


class PrivateBlocks:
    """The blank blocks of a pool, and the holders of its private ones.

    A private block has one holder, its sequence. Pins of a running sequence are further holders.
    Holders are counted only while there are such pins.

    Attributes:
        blank: the ids of unused blocks; the most recently used are at the end.
        num_pins: how many live pins hold, or held, private blocks.
    """

    def __init__(self, ids: Iterable[int]) -> None:
        self.blank: BlockIds = array("i", ids)
        self.blank.reverse()
        self.num_pins = 0
        # 0 until holders are counted; both 0 and 1 mean one holder.
        self._holders = np.zeros(max(self.blank, default=-1) + 1, np.int32)

    def add(self, ids: range) -> None:
        """Adds blank blocks to the pool."""
        self.blank.extend(reversed(ids))
        missing = max(ids) + 1 - len(self._holders)
        if missing > 0:
            self._holders = np.pad(self._holders, (0, missing))

    def take(self, count: int) -> BlockIds:
        """Makes `count` blank blocks private and returns their ids. So many must be blank."""
        keep = len(self.blank) - count
        taken = self.blank[keep:]
        del self.blank[keep:]
        taken.reverse()
        return taken

    def hold(self, ids: BlockIds) -> None:
        """Adds a holder to these private blocks."""
        if ids:
            which = np.frombuffer(ids, np.int32)
            self._holders[which] = np.maximum(self._holders[which], 1) + 1

    def drop(self, ids: BlockIds) -> None:
        """Removes a holder from these private blocks. Blocks without a holder become blank."""
        if not ids:
            return
        if not self.num_pins:
            self.blank.extend(ids)
            return
        which = np.frombuffer(ids, np.int32)
        left = np.maximum(self._holders[which] - 1, 0)
        self._holders[which] = left
        self.blank.frombytes(which[left == 0].tobytes())

    def published(self, ids: BlockIds) -> None:
        """Stops counting the holders of these blocks; their segment counts them from now on."""
        if self.num_pins:
            self._holders[np.frombuffer(ids, np.int32)] = 0

    def num_holders(self, block: int) -> int:
        """Returns the number of holders of a private block."""
        return max(int(self._holders[block]), 1) if self.num_pins else 1
