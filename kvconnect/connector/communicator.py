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
    "SingleProcess",
    "agreed",
    "obeyed",
    "tell",
]

T = TypeVar("T")


class Communicator(Protocol):
    """The ranks of one engine. Both methods are collective: every rank calls them in one order."""

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
        error: what the leader's scheduler raised instead; see `tell`.
    """

    step: int
    metadata: object = None
    loads: tuple[LoadOrder, ...] = ()
    saving: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The second exchange: what one rank saw of its transfers in this step.

    Attributes:
        step: its number.
        saved, loaded: requests whose transfer ended with success on this rank.
        failures: transfers that will not finish on this rank.
        expired_loads, expired_saves: past their deadline by this rank's clock.
        worker_meta: for the scheduler, from `build_worker_meta`.
        error: how this rank's worker broke its contract, or what it raised. It travels here, so
            that all ranks raise together instead of one raising and the others waiting for it.
    """

    step: int
    saved: tuple[int, ...] = ()
    loaded: tuple[int, ...] = ()
    failures: tuple[TransferFailure, ...] = ()
    expired_loads: tuple[int, ...] = ()
    expired_saves: tuple[int, ...] = ()
    worker_meta: object = None
    error: str | None = None


def obeyed(communicator: Communicator, mine: Instructions) -> Instructions:
    """The first exchange of a step: the leader's instructions.

    Raises:
        RankDivergence: the leader is in another step than this rank.
        ConnectorContractError: the leader's scheduler raised.
    """
    leaders = communicator.broadcast(mine)
    error: Exception
    if leaders.step != mine.step:
        error = RankDivergence(
            f"rank {communicator.rank} is in step {mine.step}, the leader in step {leaders.step}"
        )
    elif leaders.error is not None:
        error = ConnectorContractError(leaders.error)
    else:
        return leaders
    tell(communicator, mine.step, error, begun=True)
    raise error


def tell(communicator: Communicator, step: int, error: Exception, *, begun: bool) -> None:
    """This rank leaves its step by `error`: make the exchanges that the others wait for.

    Collective as those are: it blocks until the others come to them.

    Args:
        communicator: the ranks.
        step: number of the step.
        error: raised by the caller afterwards; by the others as `ConnectorContractError`.
        begun: the first exchange is over.
    """
    if communicator.size == 1:
        return
    text = f"rank {communicator.rank}: {type(error).__name__}: {error}"
    if not begun:
        communicator.broadcast(Instructions(step, error=text))
    communicator.allgather(Report(step, error=text))


def agreed(communicator: Communicator, mine: Report) -> list[Report]:
    """The second exchange of a step: every rank's report.

    Raises:
        RankDivergence: a rank is in another step.
        ConnectorContractError: a rank's worker broke its contract, or raised.
    """
    reports = communicator.allgather(mine)
    steps = [report.step for report in reports]
    if any(step != mine.step for step in steps) or len(steps) != communicator.size:
        raise RankDivergence(f"rank {communicator.rank} is in step {mine.step}, all ranks: {steps}")
    for report in reports:
        if report.error is not None:
            raise ConnectorContractError(report.error)
    return reports
