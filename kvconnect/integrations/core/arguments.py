"""The pair's arguments from an engine's settings, shared by equal ones of a process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from kvconnect.config import KvCacheConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.connector.io.identity import stored_as
from kvconnect.integrations.core.settings import EngineSettings
from kvconnect.keys import Shard
from kvconnect.layout import KvCacheLayout


def make_arguments(
    settings: EngineSettings,
    directory: Path,
    model_digest: bytes,
    layouts: Sequence[KvCacheLayout],
    *,
    shard: Shard = Shard(),
    num_kv_heads: Sequence[int] = (),
) -> LlmArgs:
    """Returns the arguments of the built-in pair.

    Args:
        settings: the settings of the adapter.
        directory: the directory of the model.
        model_digest: the digest of the model; see `digest_of_model`.
        layouts: the layouts of this rank's pool groups.
        shard: this rank.
        num_kv_heads: the KV heads of each group in the whole model.

    Raises:
        ConfigurationError: a codec or its key cannot be used; heads do not fit the ranks.
    """
    args = LlmArgs(
        model=str(directory),
        kv_cache_config=KvCacheConfig(),  # the layouts say what another engine's is
        kv_connector_config=settings.connector,
        layouts=tuple(layouts),
        model_digest=stored_as(model_digest, settings.connector, engine=settings.engine),
        place=shard,
        num_kv_heads=tuple(num_kv_heads),
    )
    _ = args.stored_heads  # refuses what does not fit
    return args


class SharedArguments:
    """The arguments, and so the store, that a scheduler and a worker in one process share.

    Thread-safe. `take` and `give_back` come in pairs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: list[tuple[str, LlmArgs]] = []

    def take(self, engine: str, args: LlmArgs) -> LlmArgs:
        """Returns equal arguments that were taken for the same `engine` before, else `args`."""
        with self._lock:
            known = next((one for one in self._taken if one == (engine, args)), (engine, args))
            self._taken.append(known)
        return known[1]

    def give_back(self, engine: str, args: LlmArgs) -> None:
        """Removes one user of the arguments."""
        with self._lock:
            self._taken.remove((engine, args))
