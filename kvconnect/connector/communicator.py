"""How the ranks of one engine agree on a step: two exchanges, before and after the forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvconnect.connector.data import TransferFailure
from kvconnect.errors import ConnectorContractError, RankDivergence

__all__ = [
    "Communicator",
    "Instructions",
    "LoadOrder",
    "Report",
    "RequestError",
    "SingleProcess",
    "agreed",
    "obeyed",
]

T = TypeVar("T")


class Communicator(Protocol):
    """The ranks of one engine.

    `broadcast` and `allgather` are collective: every rank calls them in one order. An engine may
    make exchanges of its own between those of a step.
    """

    @property
    def rank(self) -> int:
        """This process; 0 is the leader."""

    @property
    def size(self) -> int:
        """How many there are."""

    def broadcast(self, value: T) -> T:
        """The leader's `value`, on every rank. Blocks until the leader has called."""

    def allgather(self, value: T) -> list[T]:
        """Every rank's `value`, by rank. Blocks until all have called."""

    def fail(self, error: BaseException) -> None:
        """This rank leaves its step by `error`, which the caller raises: the engine is over.

        Not collective. Every other rank raises in the exchange that it is in, or in its next one:
        `RankDivergence` if `error` is one, else `ConnectorContractError` with this rank and `error`
        in its text. The first call of any rank counts.
        """


class SingleProcess:
    """The only rank."""

    rank = 0
    size = 1

    def broadcast(self, value: T) -> T:
        """`value`."""
        return value

    def allgather(self, value: T) -> list[T]:
        """`value` alone."""
        return [value]

    def fail(self, error: BaseException) -> None:
        """Nothing: there is no other rank."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A load that starts in this step and makes the tokens ``start..end`` of a request valid."""

    request_id: int
    start: int
    end: int
    is_async: bool


@dataclass(frozen=True, slots=True)
class Instructions:
    """The first exchange: what the leader wants of every rank in this step.

    Attributes:
        step: its number.
        metadata: for the workers, from `build_connector_meta`.
        loads: that start now.
        saving: requests that ended and whose blocks are kept for a save that starts now.
        dropped: requests whose offered load in the background was not taken; a connector that did
            not see that may return their ids all the same.
    """

    step: int
    metadata: object = None
    loads: tuple[LoadOrder, ...] = ()
    saving: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestError:
    """What a rank's worker raised for one request: class and text."""

    request_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """The second exchange: what one rank saw of its transfers in this step.

    Attributes:
        step: its number.
        saved, loaded: requests whose transfer ended with success on this rank.
        failures: transfers that will not finish on this rank.
        expired_loads, expired_saves: past their deadline by this rank's clock.
        worker_meta: for the scheduler, from `build_worker_meta`.
        request_errors: what this rank's worker raised for single requests; of the leader's none.
        error: how this rank's worker broke its contract. It travels here, so that all ranks raise
            together.
    """

    step: int
    saved: tuple[int, ...] = ()
    loaded: tuple[int, ...] = ()
    failures: tuple[TransferFailure, ...] = ()
    expired_loads: tuple[int, ...] = ()
    expired_saves: tuple[int, ...] = ()
    worker_meta: object = None
    request_errors: tuple[RequestError, ...] = ()
    error: str | None = None


def obeyed(communicator: Communicator, mine: Instructions) -> Instructions:
    """The first exchange of a step: the leader's instructions.

    Raises:
        RankDivergence: a rank is in another step than the leader.
        ConnectorContractError: another rank has failed.
    """
    leaders = communicator.broadcast(mine)
    if leaders.step != mine.step:
        error = RankDivergence(
            f"rank {communicator.rank} is in step {mine.step}, the leader in step {leaders.step}"
        )
        communicator.fail(error)
        raise error
    return leaders


def agreed(communicator: Communicator, mine: Report) -> list[Report]:
    """The second exchange of a step: every rank's report.

    Raises:
        RankDivergence: a rank is in another step.
        ConnectorContractError: a rank's worker broke its contract, or another rank has failed.
    """
    reports = communicator.allgather(mine)
    steps = [report.step for report in reports]
    if any(step != mine.step for step in steps) or len(steps) != communicator.size:
        raise RankDivergence(f"rank {communicator.rank} is in step {mine.step}, all ranks: {steps}")
    for report in reports:
        if report.error is not None:
            raise ConnectorContractError(report.error)
    return reports
