"""The built-in scheduler for an engine that repeats calls instead of waiting."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, ClassVar

from kvconnect.connector.data import LlmArgs, RequestData
from kvconnect.connector.io.orders import SaveOrder
from kvconnect.connector.pair.scheduler import OffloadScheduler
from kvconnect.request import LlmRequest


class EngineScheduler(OffloadScheduler):
    """An `OffloadScheduler` for an engine that accepts whole blocks only.

    Such an engine overwrites the snapshots of recurrent states soon. A snapshot is ordered into the
    store in the step that reports its block, or never.
    """

    whole_blocks: ClassVar[bool] = True
    hashes_at_once: ClassVar[bool] = False
    keeps_snapshots: ClassVar[bool] = False

    def __init__(self, llm_args: LlmArgs) -> None:
        self._unanswered: Future[Any] | None = None
        super().__init__(llm_args)

    def ask_num_new_matched_tokens(
        self, request: LlmRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Returns the result of `get_num_new_matched_tokens` without waiting; may be repeated.

        Never blocks. May be called any number of times; only the last answer counts.

        Returns:
            ``None`` in place of the tokens while the lookup is under way and within its budget,
            which counts from the first call.
        """
        if self._finding is None:
            return 0, False
        found = self._finding.ask(request, num_computed_tokens)
        if isinstance(found, Future):
            self._unanswered = found
            return None, False
        return found, found > 0

    def _order_save(self, data: RequestData, saves: list[SaveOrder]) -> None:
        super()._order_save(data, saves)
        for group in self._states:
            self._plans[data.request_id].forget_group(group)

    def wait_for_answer(self, timeout_s: float) -> None:
        """Blocks until an unanswered lookup has an answer, at most `timeout_s`.

        For a step without anything to compute: an engine's thread that loops at once would keep the
        store's threads from running. Returns at once if no lookup waits.
        """
        unanswered, self._unanswered = self._unanswered, None
        if unanswered is not None:
            with suppress(TimeoutError, CancelledError):
                unanswered.exception(timeout_s)
