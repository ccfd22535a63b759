"""How many blocks fit."""

from __future__ import annotations

import torch

from kvconnect.config import KvCacheConfig
from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout

__all__ = ["DEFAULT_CPU_BYTES", "num_primary_blocks"]

_CPU = torch.device("cpu")

DEFAULT_CPU_BYTES = 1 << 30
"""Without CUDA, and without a limit by the user, the cache takes so much."""


def num_primary_blocks(
    config: KvCacheConfig, layout: KvCacheLayout, device: torch.device = _CPU
) -> int:
    """Blocks of the primary pool: the smallest that `config`'s limits allow.

    On CUDA it asks the driver for the free memory, so the model's weights must be loaded.

    Raises:
        ConfigurationError: not even one block fits; names the limit.
    """
    limits: dict[str, int] = {}
    if config.max_tokens is not None:
        limits["max_tokens"] = -(-config.max_tokens // layout.tokens_per_block)
    if config.max_gpu_total_bytes:
        limits["max_gpu_total_bytes"] = config.max_gpu_total_bytes // layout.block_nbytes
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        share = int(free * config.free_gpu_memory_fraction)
        limits["free_gpu_memory_fraction"] = share // layout.block_nbytes
    elif not limits:
        return max(DEFAULT_CPU_BYTES // layout.block_nbytes, 1)
    field = min(limits, key=lambda name: limits[name])
    if limits[field] < 1:
        raise ConfigurationError(
            f"{field}: {getattr(config, field)} leaves no room for one block of "
            f"{layout.block_nbytes} bytes ({layout.tokens_per_block} tokens); raise it, or lower "
            "tokens_per_block"
        )
    return limits[field]
