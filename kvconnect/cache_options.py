"""The settings of one request: how it uses stores, and how long its blocks are worth keeping."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool

from kvconnect.backend import DEFAULT_RETENTION_PRIORITY
from kvconnect.errors import ConfigurationError
from kvconnect.quantities import LONGEST_S, parse_duration
from kvconnect.retention import KvCacheRetentionConfig, Priority, TokenRangeRetentionConfig
from kvconnect.settings import Settings


def _seconds(given: Any) -> Any:
    if isinstance(given, timedelta):
        return given.total_seconds()
    if isinstance(given, bool):
        raise ValueError("a duration such as 30s, 12h or 7d, or seconds are needed")  # noqa: TRY004
    if not isinstance(given, str):
        return given
    try:
        return parse_duration(given)
    except ConfigurationError as error:
        raise ValueError(str(error).partition(": ")[2]) from error


Seconds = Annotated[
    float, Field(gt=0, le=LONGEST_S, allow_inf_nan=False), BeforeValidator(_seconds)
]


class CacheOptions(Settings):
    """The use of stores by one request, and the worth of its blocks.

    Attributes:
        load: look the prompt up in stores, and load what they have. False: nothing is looked up or
            loaded. Blocks that are on the device or in the engine's host memory are reused, and
            another engine's are fetched as ``kv_transfer_params`` say.
        save: save the request's blocks to stores. False: this request saves none; another request
            that uses the same blocks, from the device, may save them.
        priority: retention priority of all blocks of the request, 0 (evicted first) to 100; on the
            device, in host memory and, where it is a store's order, there. ``None``: 35, as of any
            request. Blocks below the connector's ``min_priority`` are not saved.
        ttl: how long they are wanted: ``1h``, or seconds, or a ``timedelta``. On the device
            `priority` lasts so long from when a block is first released; after that it is 35. In a
            store, the blocks that this request saved are not found after this time, or after the
            store's own ``ttl=`` if that is less. A store of your own without the capability
            ``expires_each`` keeps to its ``ttl=``, and a warning is logged. ``None``: no limit of
            the request's own.
    """

    load: StrictBool = True
    save: StrictBool = True
    priority: Priority | None = None
    ttl: Seconds | None = None

    def retention(self) -> KvCacheRetentionConfig | None:
        """Returns the retention that `priority` and `ttl` ask for; ``None``: neither is given."""
        if self.priority is None and self.ttl is None:
            return None
        priority = DEFAULT_RETENTION_PRIORITY if self.priority is None else self.priority
        duration_ms = None if self.ttl is None else 1000 * self.ttl
        return KvCacheRetentionConfig(
            token_range_retention_configs=(
                TokenRangeRetentionConfig(
                    token_start=0, priority=priority, duration_ms=duration_ms
                ),
            ),
            decode_retention_priority=priority,
            decode_duration_ms=duration_ms,
        )
