"""The orders for single requests, from the leader to the workers of all ranks."""

from __future__ import annotations

from kvconnect.connector.ranks.communicator import CancelLoad, RequestOrder, ResetRequest
from kvconnect.connector.runtime.rank import RankDriver
from kvconnect.connector.runtime.request_errors import RequestErrors
from kvconnect.request import LlmRequest

__all__ = ["RankOrders"]


class RankOrders:
    """Carries orders out on the leader's rank at once; the other ranks get them with a step.

    Args:
        driver: the driver of the leader's worker.
        errors: records the errors of that worker.
        num_ranks: the number of ranks.
    """

    def __init__(self, driver: RankDriver, errors: RequestErrors, *, num_ranks: int) -> None:
        self._driver = driver
        self._errors = errors
        self._has_others = num_ranks > 1
        self._orders: list[RequestOrder] = []

    def cancel(self, request: LlmRequest, ranks: frozenset[int]) -> None:
        """Orders `ranks` to cancel the load of `request`."""
        self._give(request, CancelLoad(request.request_id, ranks))

    def reset(self, request: LlmRequest) -> None:
        """Orders all ranks to finish reading the blocks of `request`, which are freed next."""
        self._give(request, ResetRequest(request.request_id, request.num_computed_tokens))

    def take(self) -> tuple[RequestOrder, ...]:
        """Returns the orders since the last call, for the other ranks."""
        taken, self._orders = tuple(self._orders), []
        return taken

    def _give(self, request: LlmRequest, order: RequestOrder) -> None:
        with self._errors.kept(request):
            self._driver.carry_out(order)
        if self._has_others:
            self._orders.append(order)
