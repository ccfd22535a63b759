"""The memory that the cache may take on a rank."""

from __future__ import annotations

import torch

from kvconnect.config import KvCacheConfig

__all__ = ["free_nbytes", "limited"]


def free_nbytes(config: KvCacheConfig, device: torch.device) -> int:
    """Returns the memory of `device` that the cache may take; 0 where that is no limit."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * config.free_gpu_memory_fraction)


def limited(config: KvCacheConfig, nbytes: int) -> KvCacheConfig:
    """Returns `config` for a cache of at most so many bytes; 0: no further limit."""
    if not nbytes:
        return config
    given = config.max_gpu_total_bytes or nbytes
    return config.model_copy(update={"max_gpu_total_bytes": min(given, nbytes)})
