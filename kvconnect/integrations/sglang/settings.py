"""The storage configuration of SGLang, checked."""

from __future__ import annotations

from typing import Any

from kvconnect.errors import ConfigurationError, UnsupportedModel
from kvconnect.integrations.core.settings import EngineSettings
from kvconnect.keys import Shard
from kvconnect.text import shown

ENGINE = "sglang"
WHERE = "hicache-storage-backend-extra-config"

# Fields that SGLang itself reads.
_ITS_OWN = (
    *("backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size"),
    *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
    *("prefetch_timeout_max", "hicache_storage_pass_prefix_keys", "head_group", "layer_partition"),
)
# SGLang saves on its own threads, which may wait.
_PATIENT = {"on_backlog": "wait"}
# SGLang decides which pages are saved, and the least number to load. There are no producers.
_WITHOUT = ("save_on", "min_load_tokens", "producer_timeout_s")


def storage_settings(storage_config: Any) -> EngineSettings:
    """Returns the settings in a ``HiCacheStorageConfig``.

    Raises:
        ConfigurationError: ``url`` or ``interface_v1`` is missing, or a field is wrong; names it.
    """
    given = getattr(storage_config, "extra_config", None) or {}
    if not isinstance(given, dict):
        raise ConfigurationError(f"{WHERE}: {shown(given)} must be an object of settings")
    if not given.get("interface_v1"):
        raise ConfigurationError(
            f"{WHERE}.interface_v1: {shown(given.get('interface_v1'))} must be 1: pages are moved "
            "by SGLang's batch_get_v1 and batch_set_v1"
        )
    settings = EngineSettings.of(
        ENGINE, _PATIENT | given, where=WHERE, passed_over=_ITS_OWN, without=_WITHOUT
    )
    if settings.is_shared:
        raise ConfigurationError(
            f"{WHERE}.namespace: 'shared' is not possible: SGLang gives its storage hashes instead "
            "of tokens, and no other engine makes keys of these; leave it out"
        )
    return settings


def rank_of(storage_config: Any) -> Shard:
    """Returns this rank's share of the heads; pipeline stages differ by their layers.

    Raises:
        UnsupportedModel: tokens of one page are spread over ranks.
    """
    for name in ("attn_cp_size", "dcp_size"):
        if (size := getattr(storage_config, name, 1) or 1) > 1:
            raise UnsupportedModel(f"{name}={size}: context parallelism is not served")
    return Shard(tp_rank=storage_config.tp_rank, tp_size=storage_config.tp_size)
