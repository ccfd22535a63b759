"""What a block manager of one full-attention pool accepts of its settings."""

from __future__ import annotations

from collections.abc import Mapping

from kvconnect.config import KvCacheConfig
from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout

__all__ = ["fixed_num_blocks", "refuse_unsupported"]


def refuse_unsupported(
    config: KvCacheConfig,
    layout: KvCacheLayout,
    num_host_blocks: int | Mapping[int | None, int] | None,
) -> None:
    """Refuse what would otherwise be ignored.

    Raises:
        ConfigurationError: names the setting.
    """
    if config.tokens_per_block != layout.tokens_per_block:
        raise ConfigurationError(
            f"tokens_per_block: the configuration says {config.tokens_per_block}, the layout "
            f"{layout.tokens_per_block}"
        )
    if config.host_cache_size:
        raise ConfigurationError(
            f"host_cache_size: {config.host_cache_size} is not supported yet; only 0 is"
        )
    if num_host_blocks is not None and _total(num_host_blocks):
        raise ConfigurationError(
            f"num_host_blocks: {num_host_blocks} is not supported yet; only 0 is"
        )
    if config.event_buffer_max_size:
        raise ConfigurationError(
            f"event_buffer_max_size: {config.event_buffer_max_size} is not supported yet; only 0 is"
        )
    if config.pool_ratio is not None and len(config.pool_ratio) > 1:
        raise ConfigurationError(
            f"pool_ratio: {config.pool_ratio} shares memory out to several pools, and there is one"
        )


def fixed_num_blocks(num_blocks: int | Mapping[int | None, int] | None) -> int | None:
    """The number of blocks that the caller fixed.

    Raises:
        ConfigurationError: less than one, or for a pool other than full attention.
    """
    if isinstance(num_blocks, Mapping):
        windows = [window for window in num_blocks if window is not None]
        if windows or None not in num_blocks:
            raise ConfigurationError(
                f"num_blocks: pools of windows {windows} are not supported yet; give one number, "
                "or {None: number}"
            )
        num_blocks = num_blocks[None]
    if num_blocks is not None and num_blocks < 1:
        raise ConfigurationError(f"num_blocks: {num_blocks} must be at least 1")
    return num_blocks


def _total(num_blocks: int | Mapping[int | None, int]) -> int:
    return sum(num_blocks.values()) if isinstance(num_blocks, Mapping) else num_blocks
