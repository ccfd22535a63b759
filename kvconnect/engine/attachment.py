"""The connector that the engine drives, and its substitute in an engine without one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeAlias

from kvconnect.backend import Backend
from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.connector.io.identity import stored_as
from kvconnect.connector.ranks.communicator import Communicator, SingleProcess
from kvconnect.connector.runtime.manager import KvCacheConnectorManager
from kvconnect.connector.runtime.transfers import StepOutcome
from kvconnect.errors import ConfigurationError
from kvconnect.keys import Shard
from kvconnect.request import ScheduledBatch
from kvconnect.text import shown

if TYPE_CHECKING:  # imports transformers, which takes seconds
    from kvconnect.engine.model.pool_groups import CacheGeometry


class NoConnector:
    """The substitute of `KvCacheConnectorManager` in an engine without connector.

    It only begins the steps of the other ranks, so that the engine needs no condition. Its other
    methods do nothing, and return that nothing loads, saves or has failed.

    Args:
        communicator: the communicator of all ranks; by default there is one.
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        self._communicator = communicator or SingleProcess()

    def begin_step(self, batch: ScheduledBatch, work: object = None) -> None:
        """Sends `work` to the other ranks."""
        self._communicator.broadcast(work)

    def end_step(self) -> StepOutcome:
        """Returns an outcome in which nothing ended."""
        return StepOutcome()

    def _nothing(self, *_: object) -> None:
        """Does nothing."""

    on_new_request = set_worth = request_reset = on_rewind = shutdown = _nothing
    begin_idle_step = wait_for_layer_load = save_kv_layer = end_forward = _nothing

    def _none(self, *_: object) -> Any:
        """Returns None: nothing is in flight, and there is no data for the client."""
        return None

    wait_seconds = get_kv_transfer_params = _none

    def _false(self, *_: object, **__: object) -> bool:
        """Returns False: nothing is in flight, and blocks may be freed."""
        return False

    expects_news = request_finished = _false

    def _empty(self) -> dict[int, Any]:
        """Returns no errors of requests, and no failed loads."""
        return {}

    take_errors = agree = _empty


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


def connector_args(
    directory: Path,
    kv_cache: KvCacheConfig,
    connector: KvCacheConnectorConfig,
    geometry: CacheGeometry,
    *,
    model_digest: bytes,
    place: Shard,
) -> LlmArgs:
    """Returns the arguments of the connector of rank `place`, whose files have `model_digest`."""
    return LlmArgs(
        str(directory),
        kv_cache,
        connector,
        layouts=geometry.stored_layouts,
        model_digest=stored_as(geometry.digest(model_digest), connector),
        place=place,
        num_kv_heads=geometry.stored_kv_heads,
    )
