"""The configuration that vLLM makes in this process before its engines load weights."""

from __future__ import annotations

import multiprocessing
import threading
import time
from typing import Any

from kvconnect.connector.io.identity import check_store
from kvconnect.integrations.core.settings import EngineSettings
from kvconnect.integrations.vllm.callers import is_configuring, transfer_of_lookup


class LookupTimes:
    """Records lookups of the connector's class, which vLLM does when a configuration is made.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: int | None = None
        self._last_taken: int | None = None

    def note(self) -> None:
        """Records a lookup, if a configuration that is being made does it on this thread."""
        if not is_configuring():
            return
        with self._lock:
            if self._first is None:
                self._first = time.time_ns()

    def take(self) -> int | None:
        """Returns when the engine that is being made may have begun to load its model.

        That is the time of the first configuration since the last engine, in nanoseconds since the
        epoch. Returns ``None`` if the process was started for the engine, so that its start counts.
        """
        if multiprocessing.parent_process() is not None:
            return None
        with self._lock:
            first, self._first = self._first, None
            if first is not None:
                self._last_taken = first
            elif self._last_taken is None:
                self._last_taken = time.time_ns()
            return self._last_taken


lookup_times = LookupTimes()
"""The lookup times of this process."""


def settings_of(transfer: Any) -> EngineSettings:
    """Returns the settings in `transfer`, vLLM's ``KVTransferConfig``.

    Raises:
        ConfigurationError: names the field.
    """
    return EngineSettings.of(
        "vllm", transfer.kv_connector_extra_config, where="kv_connector_extra_config"
    )


def check_looked_up() -> None:
    """Refuses wrong settings of the connector whose class vLLM's configuration looks up.

    vLLM makes a connector when the weights are loaded. Its configuration looks up the class before
    that, so that a typo is found at once. The store is not opened.

    Raises:
        ConfigurationError: names the field.
    """
    transfer = transfer_of_lookup()
    if transfer is not None:
        check_store(settings_of(transfer).connector)
