"""The transfers of one engine, each of which ends in exactly one way, and those of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from kvconnect.cache.resource_manager import PinnedBlocks
from kvconnect.connector.data import Direction, TransferFailure
from kvconnect.connector.runtime.reporting import RequestRecord
from kvconnect.explain.outcome import Outcome
from kvconnect.trace import count


class TransferState(Enum):
    """The state of a transfer; every one but ``ACTIVE`` is final."""

    ACTIVE = "active"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"


@dataclass(slots=True)
class Transfer:
    """A load or save of one request's blocks, over all ranks.

    Attributes:
        request_id: the id of the request.
        direction: load or save.
        deadline: the monotonic time at which it times out; ``None`` for a synchronous load, which
            ends with its step.
        start, end: the tokens that a load makes valid.
        num_valid: the smallest number of leading valid tokens that a rank reported.
        progress: for a load that overlaps with computing, by rank, the token from which on all up
            to `end` are in the blocks; ``None``: it does not overlap.
        heads: for a load that follows another engine, by rank, the token before which all are in
            the blocks or computed.
        done_ranks: ranks whose worker no longer accesses the blocks.
        failed_ranks: ranks that reported failure.
        reason: the first reported reason, for the log.
        loss: the outcome of the tokens that a failed load did not fill, as the first rank reported.
        blocks, num_blocks, grace_until: set by `Quarantine.hold`.
    """

    request_id: int
    direction: Direction
    deadline: float | None
    start: int = 0
    end: int = 0
    num_valid: int = 0
    done_ranks: set[int] = field(default_factory=set)
    failed_ranks: set[int] = field(default_factory=set)
    reason: str = ""
    loss: Outcome = Outcome.LATE
    progress: dict[int, int] | None = None
    heads: dict[int, int] = field(default_factory=dict)
    state: TransferState = TransferState.ACTIVE
    blocks: PinnedBlocks | None = None
    num_blocks: int = 0
    grace_until: float = 0.0

    @property
    def is_async(self) -> bool:
        """Returns whether the transfer runs in the background."""
        return self.deadline is not None

    @property
    def failed(self) -> bool:
        """Returns whether a rank reported failure."""
        return bool(self.failed_ranks)

    def loaded_from(self, num_ranks: int) -> int:
        """Returns the token from which on all up to `end` are in the blocks of every rank."""
        progress = self.progress or {}
        return max(progress.get(rank, self.end) for rank in range(num_ranks))

    def head(self, num_ranks: int) -> int:
        """Returns the token before which all are in the blocks of every rank or computed."""
        return min(self.heads.get(rank, 0) for rank in range(num_ranks))

    def is_late(self, now: float) -> bool:
        """Returns True if its deadline has passed."""
        return self.deadline is not None and self.deadline <= now

    def fail(self, rank: int, failure: TransferFailure) -> None:
        """Records that the transfer failed on `rank`."""
        self.num_valid = min(self.num_valid, max(failure.num_valid_tokens, self.start))
        if not self.failed:
            self.loss = failure.loss
        self.reason = self.reason or failure.reason
        self.failed_ranks.add(rank)

    def finish(self, state: TransferState) -> None:
        """Enters a final state, once."""
        if self.state is not TransferState.ACTIVE or state is TransferState.ACTIVE:
            raise AssertionError(f"{self} cannot become {state}")
        self.state = state
        count(f"connector.{self.direction.value}.{state.value}")


class Transfers:
    """The active transfers of one direction, by request."""

    def __init__(self, direction: Direction) -> None:
        self.direction = direction
        self._active: dict[int, Transfer] = {}

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[Transfer]:
        """Returns the transfers by request id, as an iterator over a copy."""
        return iter([self._active[key] for key in sorted(self._active)])

    def get(self, request_id: int) -> Transfer | None:
        """Returns the active transfer of a request, or ``None``."""
        return self._active.get(request_id)

    def start(
        self,
        request_id: int,
        deadline: float | None,
        start: int = 0,
        end: int = 0,
        *,
        overlaps: bool = False,
    ) -> Transfer:
        """Adds an active transfer; a request has at most one of each direction at a time."""
        if request_id in self._active:
            raise AssertionError(f"request {request_id} has an active {self.direction.value}")
        transfer = Transfer(
            request_id,
            self.direction,
            deadline,
            start,
            end,
            num_valid=end,
            progress={} if overlaps else None,
        )
        self._active[request_id] = transfer
        return transfer

    def finish(self, transfer: Transfer, state: TransferState) -> None:
        """Ends `transfer` in `state`."""
        transfer.finish(state)
        del self._active[transfer.request_id]

    def next_deadline(self) -> float | None:
        """Returns the earliest deadline, or ``None``."""
        return min(
            (one.deadline for one in self._active.values() if one.deadline is not None),
            default=None,
        )


@dataclass(slots=True)
class StepOutcome:
    """The transfers that ended in a step, on all ranks.

    Attributes:
        loaded: leading valid tokens by request id, for background loads that succeeded.
        loaded_from: by request id, for ended loads that overlapped with computing, the token from
            which on all up to the load's end are valid. The tokens before are valid as far as they
            were computed.
        failed: leading valid tokens by request id, for failed loads, also synchronous ones. No
            token past that position may be sampled, committed, published or streamed.
        requeue: the requests in `failed` that cannot continue, because their blocks may still get
            writes and no fresh blocks are free, or because of windows. The engine frees their
            resources and returns them to the queue.
        saved: ended requests whose kept blocks are to be freed now.
    """

    loaded: dict[int, int] = field(default_factory=dict)
    loaded_from: dict[int, int] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    requeue: set[int] = field(default_factory=set)
    saved: list[int] = field(default_factory=list)


class BlockFate(Enum):
    """The fate of a request's blocks past the valid position when its load failed."""

    KEPT = "kept"
    EXCHANGED = "exchanged"  # for fresh ones; the old ones are in the quarantine
    LOST = "lost"  # the request returns to the queue: no fresh blocks, or windows


LoadFailed = Callable[[RequestRecord, int, BlockFate], None]
"""Called with a request and its valid tokens."""
