"""The two exchanges of a step between the ranks of one engine, around the forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from kvconnect.connector.data import TransferFailure
from kvconnect.errors import RankDivergence

T = TypeVar("T")


class Communicator(Protocol):
    """The ranks of one engine.

    `broadcast` and `allgather` are collective: every rank calls them in one order. An engine may
    make exchanges of its own between those of a step.
    """

    @property
    def rank(self) -> int:
        """The number of this process; 0 is the leader."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def broadcast(self, value: T) -> T:
        """Returns the leader's `value`, on every rank. Blocks until the leader has called."""

    def allgather(self, value: T) -> list[T]:
        """Returns every rank's `value`, by rank. Blocks until all have called."""

    def fail(self, error: BaseException) -> None:
        """Ends the engine, because this rank leaves its step by `error`, which the caller raises.

        Not collective. Every other rank raises in the exchange that it is in, or in its next one:
        `RankDivergence` if `error` is one, else `ConnectorContractError` with this rank and `error`
        in its text. Only the first call of any rank has an effect.
        """


class SingleProcess:
    """The only rank."""

    rank = 0
    size = 1

    def broadcast(self, value: T) -> T:
        """Returns `value`."""
        return value

    def allgather(self, value: T) -> list[T]:
        """Returns `value` alone."""
        return [value]

    def fail(self, error: BaseException) -> None:
        """Does nothing: there is no other rank."""


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """An order to cancel a background load whose request no longer waits for it.

    Attributes:
        request_id: the id of the request.
        ranks: the ranks whose workers are called.
    """

    request_id: int
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class ResetRequest:
    """An order to finish reading the blocks of a request, which are freed afterwards.

    Attributes:
        request_id: the id of the request.
        num_committed: the request's leading tokens whose KV is valid.
    """

    request_id: int
    num_committed: int


RequestOrder: TypeAlias = CancelLoad | ResetRequest


@dataclass(frozen=True, slots=True)
class Instructions:
    """The message of the first exchange: all that a rank needs for one step of worker and model.

    Attributes:
        step: the number of the step.
        metadata: the workers' metadata, from `build_connector_meta` or `build_idle_meta`.
        is_idle: true if no request computes or starts to load, so that there is no forward pass.
        saving: ended requests whose save starts in this step.
        loading: requests whose background load starts in this step.
        orders: orders for single requests, which a rank carries out first, in order.
        work: the data for the rank's engine; the connector's runtime does not read it.
    """

    step: int
    metadata: object = None
    is_idle: bool = False
    saving: tuple[int, ...] = ()
    loading: tuple[int, ...] = ()
    orders: tuple[RequestOrder, ...] = ()
    work: object = None


@dataclass(frozen=True, slots=True)
class Report:
    """The message of the second exchange: the answers of one rank's worker in a step.

    Attributes:
        step: the number of the step.
        saved, loaded: requests whose save or load the worker returned as ended.
        failures: transfers that failed on this rank.
        progress: for loads that overlap with computing: the request, and the token from which on
            all up to the load's end are in its blocks.
        heads: for loads that follow another engine: the request, and the token before which all
            are in its blocks or computed.
        load_times: the progress of loads over time: the request, and positions with seconds.
        worker_meta: the data for the scheduler, from `build_worker_meta`.
        request_errors: errors of this rank's worker for single requests, as texts with class and
            message; none on the leader.
    """

    step: int
    saved: tuple[int, ...] = ()
    loaded: tuple[int, ...] = ()
    failures: tuple[TransferFailure, ...] = ()
    progress: tuple[tuple[int, int], ...] = ()
    heads: tuple[tuple[int, int], ...] = ()
    load_times: tuple[tuple[int, tuple[tuple[int, float], ...]], ...] = ()
    worker_meta: object = None
    request_errors: tuple[tuple[int, str], ...] = ()


def agreed(communicator: Communicator, mine: Report) -> list[Report]:
    """Makes the second exchange of a step, and returns every rank's report.

    Raises:
        RankDivergence: a rank is in another step.
        ConnectorContractError: another rank has failed.
    """
    reports = communicator.allgather(mine)
    steps = [report.step for report in reports]
    if any(step != mine.step for step in steps) or len(steps) != communicator.size:
        raise RankDivergence(f"rank {communicator.rank} is in step {mine.step}, all ranks: {steps}")
    return reports
