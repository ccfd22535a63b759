"""The memory for frames that cannot be sealed where their payload is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvconnect.frame import ALIGNMENT

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Scratch", "ScratchPair"]

_PAIRS = 2


class ScratchPair:
    """A pair of buffers: one is filled while the other is written to the store."""

    def __init__(self) -> None:
        import torch

        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]

    def room(self, number: int, nbytes: int) -> Tensor:
        """Returns `nbytes`, page-aligned, in the memory of the piece before the last one."""
        import torch

        memory = self._memory[number % 2]
        if memory.numel() < nbytes + ALIGNMENT:
            self._memory[number % 2] = memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
        offset = -memory.data_ptr() % ALIGNMENT
        return memory[offset : offset + nbytes]


class Scratch:
    """The pairs of a store: at most two savers have one at a time; others wait for their turn.

    So there are at most four buffers, even if the store hangs: a save that does not end keeps its
    pair. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(_PAIRS)
        self._idle: list[ScratchPair] = []

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[ScratchPair]:
        """Yields a pair for the time of one save; waits for its turn."""
        async with self._turns:
            pair = self._idle.pop() if self._idle else ScratchPair()
            try:
                yield pair
            finally:
                self._idle.append(pair)

    def clear(self) -> None:
        """Frees the memory that is not used."""
        self._idle.clear()
