"""The step that a rank is in: its number, its instructions, its exchanges with the others."""

from __future__ import annotations

from kvconnect.connector.communicator import (
    Communicator,
    Instructions,
    LoadOrder,
    Report,
    agreed,
    obeyed,
)
from kvconnect.errors import UsageError

__all__ = ["RankSteps"]


class RankSteps:
    """Steps of one rank, one after the other: each is one `begin` and one `end`.

    Attributes:
        number: of the step that has begun or is next; the first is 1.
        telling: ``with steps.telling:`` around what may raise in a step. The other ranks hear of
            the error before it goes on, and raise, too, wherever they wait for this rank.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._begun: Instructions | None = None
        self.number = 1
        self.telling = _Telling(communicator)

    @property
    def has_begun(self) -> bool:
        """Whether the step is between its exchanges."""
        return self._begun is not None

    @property
    def begun(self) -> Instructions:
        """The leader's instructions for the step that has begun.

        Raises:
            UsageError: none has.
        """
        if self._begun is None:
            raise UsageError("no step has begun")
        return self._begun

    def begin(
        self,
        metadata: object,
        loads: tuple[LoadOrder, ...],
        *,
        saving: tuple[int, ...],
        dropped: tuple[int, ...],
    ) -> Instructions:
        """The first exchange; arguments, of which the leader's count, as in `Instructions`.

        Raises:
            RankDivergence: the leader is in another step.
            ConnectorContractError: another rank raised.
        """
        mine = Instructions(self.number, metadata, loads, saving, dropped)
        self._begun = begun = obeyed(self._communicator, mine)
        return begun

    def end(self, report: Report) -> list[Report]:
        """The second exchange: every rank's report; the next step has not begun after it.

        Raises:
            RankDivergence: a rank is in another step.
            ConnectorContractError: a rank's worker broke its contract, or raised.
        """
        reports = agreed(self._communicator, report)
        self._begun = None
        self.number += 1
        return reports


class _Telling:
    """Lets the other ranks know of an error in a step, before it goes on."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Reports `error` to the other ranks, also one that asks this process to end."""
        if error is not None:
            self._communicator.fail(error)
