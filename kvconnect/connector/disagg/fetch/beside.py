"""The loads from other engines whose requests compute meanwhile."""

from __future__ import annotations

from kvconnect.connector.disagg.fetch.landing import Landing
from kvconnect.connector.disagg.fetch.load import Load
from kvconnect.connector.disagg.fetch.part import PULL_NBYTES, Part
from kvconnect.errors import UsageError
from kvconnect.transfer.reads import Reads

__all__ = ["LoadsBeside"]


class LoadsBeside:
    """The floors and the progress of loads beside computing, and the way of their bytes.

    Args:
        landing: the memory in which their reads arrive; ``None``: there are no such loads.
        tokens_per_block: the tokens per block of the only pool.

    Attributes:
        heads: the begin of `Load.came_to` by request, as of the last `progress`.
    """

    def __init__(self, landing: Landing | None, tokens_per_block: int) -> None:
        self._landing = landing
        self._tokens_per_block = tokens_per_block
        self._loads: dict[int, Load] = {}  # until reported as ended; of the engine's thread
        self.heads: dict[int, int] = {}

    # ------------------------------------------------------------------ the engine's thread

    def add(self, load: Load) -> None:
        """Adds `load` if its request computes beside it."""
        if load.order.overlaps:
            self._loads[load.order.request_id] = load

    def raise_floor(self, request_id: int, num_tokens: int) -> Load | None:
        """Keeps the load of `request_id` from writing before `num_tokens`; returns the load.

        The details are those of `Load.raise_floor`. Returns ``None`` if there is none.
        """
        load = self._loads.get(request_id)
        if load is not None:
            load.raise_floor(num_tokens, self._tokens_per_block)
        return load

    def progress(self) -> dict[int, int]:
        """Returns the end of `Load.came_to` by request; that of a load that has ended once more."""
        self.heads, tails = {}, {}
        for request_id, load in list(self._loads.items()):
            if load.ended:
                del self._loads[request_id]
            self.heads[request_id], tails[request_id] = load.came_to
        return tails

    # ------------------------------------------------------------------ the fetcher's thread

    def note(self, load: Load) -> None:
        """Updates `Load.came_to`."""
        load.note(self._tokens_per_block)

    def most_nbytes(self, *, overlaps: bool) -> int:
        """Returns the most bytes of a pull, but a piece at least."""
        return self._memory.slot_nbytes if overlaps else PULL_NBYTES

    def take(self, reads: Reads) -> tuple[int, Reads] | None:
        """Returns a slot, and `reads` with the slot as their destination; ``None``: none is free.

        The caller gives the slot back once no read writes to it any more.
        """
        slot = self._memory.take()
        return None if slot is None else (slot, self._memory.into(slot, reads))

    def give_back(self, slot: int) -> None:
        """Frees `slot`."""
        self._memory.give_back(slot)

    def place(self, load: Load | None, part: Part, reads: Reads, slot: int) -> None:
        """Copies what `reads` have brought into `slot` to those blocks that are still wanted."""
        if part.over or load is None or part.arrivals is None:
            return
        numbers = part.numbers(reads)
        load.place(lambda floor: self._memory.copy(slot, reads, numbers >= floor))
        part.arrivals.arrived(reads)

    @property
    def _memory(self) -> Landing:
        if self._landing is None:
            raise UsageError("a load beside computing needs memory to land in")
        return self._landing
