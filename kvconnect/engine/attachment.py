"""The connector that the engine drives, and its substitute in an engine without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, TypeAlias

from kvconnect.backend import Backend
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.ranks.communicator import Communicator, SingleProcess
from kvconnect.connector.runtime.manager import KvCacheConnectorManager
from kvconnect.connector.runtime.transfers import StepOutcome
from kvconnect.errors import ConfigurationError
from kvconnect.request import ExternalMatch, LlmRequest, ScheduledBatch
from kvconnect.text import shown


class NoConnector:
    """The substitute of `KvCacheConnectorManager` in an engine without connector.

    It only begins the steps of the other ranks, so that the engine needs no condition.

    Args:
        communicator: the communicator of all ranks; by default there is one.
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        self._communicator = communicator or SingleProcess()

    def on_new_request(self, request: LlmRequest) -> None:
        """Does nothing."""

    def set_worth(self, is_worth: Callable[[LlmRequest, ExternalMatch], bool]) -> None:
        """Does nothing: there are no loads."""

    def take_errors(self) -> dict[int, Exception]:
        """Returns an empty mapping."""
        return {}

    def begin_step(self, batch: ScheduledBatch, work: object = None) -> None:
        """Sends `work` to the other ranks."""
        self._communicator.broadcast(work)

    def begin_idle_step(self, work: object = None) -> None:
        """Does nothing: no step is idle."""

    def wait_for_layer_load(self, layer_idx: int) -> None:
        """Does nothing."""

    def save_kv_layer(self, layer_idx: int) -> None:
        """Does nothing."""

    def end_forward(self) -> None:
        """Does nothing."""

    def agree(self) -> dict[int, int]:
        """Returns nothing: no load failed."""
        return {}

    def end_step(self) -> StepOutcome:
        """Returns an outcome in which nothing ended."""
        return StepOutcome()

    def request_finished(self, request: LlmRequest, *, aborted: bool = False) -> bool:
        """Returns False: the blocks may be freed."""
        return False

    def request_reset(self, request: LlmRequest) -> None:
        """Does nothing."""

    def on_rewind(self, request: LlmRequest) -> None:
        """Does nothing."""

    def get_kv_transfer_params(self, request: LlmRequest) -> dict[str, Any] | None:
        """Returns None: there is no data for the client."""
        return None

    def expects_news(self) -> bool:
        """Returns False: nothing is in flight."""
        return False

    def wait_seconds(self) -> float | None:
        """Returns None: nothing is in flight."""
        return None

    def shutdown(self) -> None:
        """Does nothing."""


Attachment: TypeAlias = KvCacheConnectorManager | NoConnector
"""The connector as the engine drives it."""

Connector: TypeAlias = KvCacheConnectorConfig | Backend | str | Mapping[str, object]
"""The user's connector argument: a configuration, its fields, a store, or a store's URL."""


def config_of(connector: Connector | None) -> KvCacheConnectorConfig | None:
    """Returns `connector` as a configuration.

    Raises:
        ConfigurationError: raised by `KvCacheConnectorConfig`.
    """
    if isinstance(connector, str):
        return KvCacheConnectorConfig(url=connector)
    if isinstance(connector, Backend):
        return KvCacheConnectorConfig(backend=connector)
    if connector is None:
        return None
    if isinstance(connector, PurePath):
        raise ConfigurationError(
            f"connector: {shown(connector)} is a path; give a store's URL, as 'disk:///var/cache/kv'"
        )
    return KvCacheConnectorConfig.given("connector", connector)
