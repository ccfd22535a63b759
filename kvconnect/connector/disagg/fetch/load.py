"""The loads from other engines. A load belongs to the fetcher's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvconnect.connector.data import TransferFailure
from kvconnect.connector.disagg.fetch.landing import Landing
from kvconnect.connector.disagg.fetch.part import Part
from kvconnect.connector.disagg.messages import FetchOrder
from kvconnect.transfer.reads import Reads


@dataclass(slots=True, eq=False)
class Load:
    """The parts that one request loads from the ranks of another engine.

    They are valid together or not at all, unless the request computes beside them.

    Attributes:
        order: the order of the load.
        tokens_per_block: the tokens of a block of group 0.
        done: called with the request's id and a failure, or ``None`` after success; the blocks get
            no more writes then. After a failure without `writes_ended` it is called again when the
            writes have ended.
        parts: a part for each rank of the other engine that is read.
        reason: the reason of the failure; ``None``: none.
        cancelled: true if the load's request was cancelled.
        news: called when `came_to` has changed, for a request that computes beside the load.
        came_to: the token before which all are loaded, and the one from which on all are, as of the
            last `note`.
        ended: true from before the last call of `done`.
    """

    order: FetchOrder
    tokens_per_block: int
    done: Callable[[int, TransferFailure | None], None]
    parts: list[Part] = field(default_factory=list)
    reason: str | None = None
    cancelled: bool = False
    news: Callable[[], None] = lambda: None
    came_to: tuple[int, int] = (0, 0)
    ended: bool = False
    _floor: int = 0
    _placing: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.came_to = 0, self.order.end

    def raise_floor(self, num_tokens: int) -> None:
        """Stops the load from writing to blocks with tokens before `num_tokens`.

        Blocks until a running copy into the pool has ended. Called on the engine's thread.
        """
        floor = -(-num_tokens // self.tokens_per_block) - self.order.first_blocks[0]
        if floor > self._floor:
            with self._placing:
                self._floor = floor

    def place(self, part: Part, reads: Reads, landing: Landing, slot: int) -> None:
        """Copies what `reads` have brought into `slot` to those blocks that are still wanted."""
        if part.over or part.arrivals is None:
            return
        numbers = part.numbers(reads)
        with self._placing:
            landing.copy(slot, reads, numbers >= self._floor)
        part.arrivals.arrived(reads)

    def note(self) -> None:
        """Sets `came_to` by what all parts have certain, and raises their floor."""
        order, first, size = self.order, self.order.first_blocks[0], self.tokens_per_block
        several = [part.arrivals for part in self.parts if part.arrivals is not None]
        if not several:
            return
        for one in several:
            one.raise_floor(min(self._floor, len(order.blocks[0])))
        heads, tails = zip(*(one.certain() for one in several), strict=True)
        head, tail = min(heads), max(tails)
        came_to = (
            0 if head <= self._floor else min(order.end, (first + head) * size),
            order.start if head >= tail else min(order.end, (first + tail) * size),
        )
        if came_to != self.came_to:
            self.came_to = came_to
            self.news()

    @property
    def over(self) -> bool:
        """Returns whether every part is over."""
        return all(part.over for part in self.parts)

    @property
    def writes_ended(self) -> bool:
        """Returns whether no pull can write to the load's blocks any more."""
        return all(part.writes_ended for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """Returns how many tokens have come, of a load that succeeded."""
        blocks = [one.arrivals.num_arrived for one in self.parts if one.arrivals is not None]
        whole = self.order.end - self.order.start
        if not blocks:
            return whole
        return whole * min(blocks) // max(1, len(self.order.blocks[0]))

    @property
    def nbytes(self) -> int:
        """The number of bytes that were read."""
        return sum(part.nbytes for part in self.parts)

    def stop(self, reason: str) -> None:
        """Fails every part that is not over."""
        for part in self.parts:
            part.fail(reason)


class LoadsBeside:
    """The floors and the progress of loads beside computing. Belongs to the engine's thread.

    Attributes:
        heads: the begin of `Load.came_to` by request, as of the last `progress`.
    """

    def __init__(self) -> None:
        self._loads: dict[int, Load] = {}  # until reported as ended
        self.heads: dict[int, int] = {}

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
            load.raise_floor(num_tokens)
        return load

    def progress(self) -> dict[int, int]:
        """Returns the end of `Load.came_to` by request; that of a load that has ended once more."""
        self.heads, tails = {}, {}
        for request_id, load in list(self._loads.items()):
            if load.ended:
                del self._loads[request_id]
            self.heads[request_id], tails[request_id] = load.came_to
        return tails
