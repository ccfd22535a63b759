"""What the engine sees of a connector, and what it sees where none is attached."""

from __future__ import annotations

from typing import Any, Protocol

from kvconnect.connector.runtime.ledger import StepOutcome
from kvconnect.request import LlmRequest, ScheduledBatch

__all__ = ["Attachment", "NoConnector"]


class Attachment(Protocol):
    """The part of `KvCacheConnectorManager` that the engine drives; see there."""

    def on_new_request(self, request: LlmRequest) -> None:
        """`request` enters the queue."""

    def begin_step(self, batch: ScheduledBatch) -> None:
        """The step's batch is known: loads start."""

    def wait_for_layer_load(self, layer_idx: int) -> None:
        """After this, loaded KV of the layer may be read."""

    def save_kv_layer(self, layer_idx: int) -> None:
        """The layer's KV of this step is written."""

    def end_forward(self) -> None:
        """The end of a forward pass."""

    def end_step(self) -> StepOutcome:
        """What ended since the last step."""

    def request_finished(self, request: LlmRequest, *, aborted: bool = False) -> bool:
        """Whether the blocks of `request` must be kept until it is listed as saved."""

    def request_reset(self, request: LlmRequest) -> None:
        """`request` is about to lose its blocks and goes back to the queue."""

    def on_rewind(self, request: LlmRequest) -> None:
        """The last drafts of `request` were rejected; its blocks are rewound already."""

    def get_kv_transfer_params(self, request: LlmRequest) -> dict[str, Any] | None:
        """What travels to the client with the result."""

    def expects_news(self) -> bool:
        """Whether an idle `end_step` may bring anything."""

    def wait_seconds(self) -> float | None:
        """How long to sleep with nothing runnable; ``None``: there is nothing to wait for."""

    def shutdown(self) -> None:
        """Drain and end."""


class NoConnector:
    """Does nothing, so that the engine need not ask whether a connector is attached."""

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
