"""What the engine sees of a connector, and what it sees where none is attached."""

from __future__ import annotations

from typing import Any, TypeAlias

from kvconnect.connector.runtime.ledger import StepOutcome
from kvconnect.connector.runtime.manager import KvCacheConnectorManager
from kvconnect.request import LlmRequest, ScheduledBatch

__all__ = ["Attachment", "NoConnector"]


class NoConnector:
    """The part of `KvCacheConnectorManager` that the engine drives, where none is attached.

    It does nothing, so that the engine need not ask.
    """

    def on_new_request(self, request: LlmRequest) -> None:
        """Nothing."""

    def begin_step(self, batch: ScheduledBatch) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_idx: int) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_idx: int) -> None:
        """Nothing."""

    def end_forward(self) -> None:
        """Nothing."""

    def end_step(self) -> StepOutcome:
        """Nothing ended."""
        return StepOutcome()

    def request_finished(self, request: LlmRequest, *, aborted: bool = False) -> bool:
        """The blocks may go."""
        return False

    def request_reset(self, request: LlmRequest) -> None:
        """Nothing."""

    def on_rewind(self, request: LlmRequest) -> None:
        """Nothing."""

    def get_kv_transfer_params(self, request: LlmRequest) -> dict[str, Any] | None:
        """Nothing travels."""
        return None

    def expects_news(self) -> bool:
        """Nothing is in flight."""
        return False

    def wait_seconds(self) -> float | None:
        """Nothing is in flight."""
        return None

    def shutdown(self) -> None:
        """Nothing."""


Attachment: TypeAlias = KvCacheConnectorManager | NoConnector
"""What the engine drives."""
