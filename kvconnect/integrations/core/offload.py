"""The built-in scheduler, as an engine drives it that asks instead of waiting."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Any, ClassVar

from kvconnect.connector.data import LlmArgs
from kvconnect.connector.offload.scheduler import OffloadScheduler
from kvconnect.request import LlmRequest

__all__ = ["EngineScheduler"]


class EngineScheduler(OffloadScheduler):
    """`OffloadScheduler` for an engine that takes up whole blocks.

    Args:
        llm_args: of the pair.
        loads_in_step: whether the engine can load in the step that computes; otherwise all loads
            are in the background.
    """

    whole_blocks: ClassVar[bool] = True
    hashes_at_once: ClassVar[bool] = False

    def __init__(self, llm_args: LlmArgs, *, loads_in_step: bool) -> None:
        self._engine_loads_in_step = loads_in_step
        self._unanswered: Future[Any] | None = None
        super().__init__(llm_args)

    def ask_num_new_matched_tokens(
        self, request: LlmRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As in `OffloadScheduler`."""
        found, is_async = super().ask_num_new_matched_tokens(request, num_computed_tokens)
        if found is None:
            self._unanswered = self._states[request.request_id].lookup
        return found, is_async

    def wait_for_answer(self, timeout_s: float) -> None:
        """Block until a lookup that was not answered yet is, at most `timeout_s`.

        For a step without anything to compute: an engine's thread that turns at once would keep
        the store's from running. Returns at once if no lookup waits.
        """
        unanswered, self._unanswered = self._unanswered, None
        if unanswered is not None:
            wait((unanswered,), timeout_s)

    @property
    def _loads_in_step(self) -> bool:
        return self._engine_loads_in_step and super()._loads_in_step
