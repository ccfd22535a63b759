"""The built-in scheduler, as an engine drives it that asks instead of waiting."""

from __future__ import annotations

from typing import ClassVar

from kvconnect.connector.data import LlmArgs
from kvconnect.connector.offload.scheduler import OffloadScheduler

__all__ = ["EngineScheduler"]


class EngineScheduler(OffloadScheduler):
    """`OffloadScheduler` for an engine that takes up whole blocks.

    Args:
        llm_args: of the pair.
        loads_in_step: whether the engine can load in the step that computes; otherwise all loads
            are in the background.
    """

    whole_blocks: ClassVar[bool] = True

    def __init__(self, llm_args: LlmArgs, *, loads_in_step: bool) -> None:
        self._engine_loads_in_step = loads_in_step
        super().__init__(llm_args)

    @property
    def _loads_in_step(self) -> bool:
        return self._engine_loads_in_step and super()._loads_in_step
