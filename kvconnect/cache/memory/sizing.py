"""Computes how many blocks each pool gets."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvconnect.config import KvCacheConfig
from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout

_CPU = torch.device("cpu")

DEFAULT_CPU_BYTES = 1 << 30
"""The bytes of the cache without CUDA and without a limit by the user."""

_FEWEST_STATES = 2
"""The least blocks of a pool of states: one to start from, and one to write."""

Blocks = int | Mapping[int | None, int]
"""The number of blocks of every pool, or of each by window (``None`` is full attention)."""


@dataclass(frozen=True, slots=True)
class SlabGeometry:
    """An arena that several pools share, in slabs that each hold whole blocks of any pool.

    Attributes:
        nbytes: the size of a slab.
        owners: the pool group that owns each slab at the start.
        blocks_per_slab: the blocks of each pool group in a slab.
    """

    nbytes: int
    owners: tuple[int, ...]
    blocks_per_slab: tuple[int, ...]

    def block_ids(self, slab: int, group: int) -> range:
        """Returns the ids of the blocks in slab number `slab` if pool group `group` owns it."""
        count = self.blocks_per_slab[group]
        return range(slab * count, (slab + 1) * count)


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """The pools of a cache in group order: full attention, large windows to small, then states.

    Attributes:
        layouts: the layouts of the pools.
        num_blocks: the blocks of each pool in primary; with slabs, at the start.
        num_host_blocks: the blocks of each pool in secondary.
        slabs: the memory that pools exchange; ``None`` if they exchange none.
    """

    layouts: tuple[KvCacheLayout, ...]
    num_blocks: tuple[int, ...]
    num_host_blocks: tuple[int, ...]
    slabs: SlabGeometry | None = None

    def could_supply(self, needs: Sequence[int]) -> bool:
        """Returns whether the pools have ``needs[group]`` blocks each, if none of them is held."""
        if self.slabs is None:
            return all(need <= count for need, count in zip(needs, self.num_blocks, strict=True))
        sizes = self.slabs.blocks_per_slab
        slabs = sum(-(-need // size) for need, size in zip(needs, sizes, strict=True))
        return slabs <= len(self.slabs.owners)


def pool_sizes(
    config: KvCacheConfig,
    layout: KvCacheLayout | Sequence[KvCacheLayout],
    num_blocks: Blocks | None = None,
    num_host_blocks: Blocks | None = None,
    device: torch.device = _CPU,
) -> PoolSizes:
    """Returns the sizes of all pools: divides the memory that `config` allows.

    Explicit numbers of blocks override `config`. One layout and numbers by window make one pool of
    that layout for each window. On CUDA the free memory is read from the driver, so the model's
    weights must be loaded before.

    Raises:
        ConfigurationError: a pool would have no block, or a setting does not fit the pools; the
            message names the setting.
    """
    layouts = _in_order(config, layout, num_blocks)
    _check_ratio(config, layouts)
    host = _host_blocks(config, layouts, num_host_blocks)
    if num_blocks is not None:
        return PoolSizes(layouts, _explicit("num_blocks", num_blocks, layouts, 1), host)
    field, nbytes = _primary_bytes(config, layouts, device)
    slabs = _slabs(config, layouts, nbytes, round_up=field == "max_tokens")
    if slabs is not None:
        owned = tuple(
            slabs.owners.count(group) * slabs.blocks_per_slab[group]
            for group in range(len(layouts))
        )
        return PoolSizes(layouts, owned, host, slabs)
    shared = _shared_out(config, layouts, nbytes)
    if min(shared) < 1:
        smallest = layouts[shared.index(min(shared))]
        pool = f" in the pool of window {smallest.window}" if len(layouts) > 1 else ""
        raise ConfigurationError(
            f"{field}: {getattr(config, field, nbytes)} leaves no room for one block of "
            f"{smallest.block_nbytes} bytes{pool}; raise it, or lower tokens_per_block"
        )
    return PoolSizes(layouts, shared, host)


def free_nbytes(config: KvCacheConfig, device: torch.device) -> int:
    """Returns the bytes of `device` that the cache may take; 0: no limit."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * config.free_gpu_memory_fraction)


def _blocks_for(config: KvCacheConfig, layout: KvCacheLayout, num_tokens: int) -> int:
    count = -(-num_tokens // _tokens_of(config, layout))
    return max(count, _FEWEST_STATES) if layout.kind == "state" else count


def _primary_bytes(
    config: KvCacheConfig, layouts: Sequence[KvCacheLayout], device: torch.device
) -> tuple[str, int]:
    # Returns the smallest limit, and its name.
    limits: dict[str, int] = {}
    if config.max_tokens is not None:
        limits["max_tokens"] = sum(
            _blocks_for(config, layout, config.max_tokens) * layout.block_nbytes
            for layout in layouts
        )
    if config.max_gpu_total_bytes:
        limits["max_gpu_total_bytes"] = config.max_gpu_total_bytes
    if device.type == "cuda":
        limits["free_gpu_memory_fraction"] = free_nbytes(config, device)
    elif not limits:
        smallest = sum(layout.block_nbytes for layout in layouts)
        return "default", max(DEFAULT_CPU_BYTES, smallest)
    field = min(limits, key=lambda name: limits[name])
    return field, limits[field]


def _in_order(
    config: KvCacheConfig,
    layout: KvCacheLayout | Sequence[KvCacheLayout],
    num_blocks: Blocks | None,
) -> tuple[KvCacheLayout, ...]:
    layouts = (layout,) if isinstance(layout, KvCacheLayout) else tuple(layout)
    if not layouts:
        raise ConfigurationError("layout: at least one is needed")
    if len(layouts) == 1 and isinstance(num_blocks, Mapping):
        layouts = tuple(replace(layouts[0], window=window) for window in num_blocks)
    for each in layouts:
        if config.tokens_per_block != each.tokens_per_block:
            raise ConfigurationError(
                f"tokens_per_block: the configuration says {config.tokens_per_block}, the layout "
                f"{each.tokens_per_block}"
            )
    _check_states(config, layouts)
    return tuple(sorted(layouts, key=_place))


def _place(layout: KvCacheLayout) -> tuple[bool, float]:
    window = math.inf if layout.window is None else layout.window
    return layout.kind == "state", -window


def _check_states(config: KvCacheConfig, layouts: Sequence[KvCacheLayout]) -> None:
    count = sum(layout.kind == "state" for layout in layouts)
    if count > 1:
        raise ConfigurationError(f"layout: all states belong into one layout, there are {count}")
    if count and config.state_interval % config.tokens_per_block:
        raise ConfigurationError(
            f"state_interval: {config.state_interval} must be a multiple of tokens_per_block="
            f"{config.tokens_per_block}"
        )


def _tokens_of(config: KvCacheConfig, layout: KvCacheLayout) -> int:
    """Returns the tokens from one block of `layout` to the next, on a long prompt."""
    return config.state_interval if layout.kind == "state" else layout.tokens_per_block


def _explicit(
    field: str, given: Blocks, layouts: Sequence[KvCacheLayout], least: int
) -> tuple[int, ...]:
    if isinstance(given, Mapping):
        windows = {layout.window for layout in layouts}
        if given.keys() - windows or (least and windows - given.keys()):
            raise ConfigurationError(
                f"{field}: {dict(given)} must name the windows of the pools, {list(windows)}"
            )
        counts = tuple(given.get(layout.window, 0) for layout in layouts)
    else:
        counts = (given,) * len(layouts)
    if min(counts) < least:
        raise ConfigurationError(f"{field}: {min(counts)} must be at least {least}")
    return counts


def _check_ratio(config: KvCacheConfig, layouts: Sequence[KvCacheLayout]) -> None:
    ratio = config.pool_ratio
    if ratio is not None and len(ratio) != len(layouts):
        raise ConfigurationError(
            f"pool_ratio: {ratio} shares memory out to {len(ratio)} pools, and there "
            f"{'is one' if len(layouts) == 1 else f'are {len(layouts)}'}"
        )


def _weights(config: KvCacheConfig, layouts: Sequence[KvCacheLayout]) -> list[float]:
    given = config.pool_ratio or [
        layout.block_nbytes / _tokens_of(config, layout) for layout in layouts
    ]
    return [weight / sum(given) for weight in given]


def _shared_out(
    config: KvCacheConfig, layouts: Sequence[KvCacheLayout], nbytes: int
) -> tuple[int, ...]:
    weights = _weights(config, layouts)
    shares = [nbytes * weight for weight in weights]
    last = layouts[-1]
    if last.kind == "state" and shares[-1] < _FEWEST_STATES * last.block_nbytes:
        # A block of states is large, so the other pools contribute their shares of the missing
        # bytes.
        shares[-1] = float(min(_FEWEST_STATES * last.block_nbytes, nbytes))
        left = (nbytes - shares[-1]) / max(sum(weights[:-1]), 1e-9)
        shares[:-1] = [left * weight for weight in weights[:-1]]
    return tuple(
        int(share + 0.5) // layout.block_nbytes
        for share, layout in zip(shares, layouts, strict=True)
    )


def _host_blocks(
    config: KvCacheConfig, layouts: Sequence[KvCacheLayout], given: Blocks | None
) -> tuple[int, ...]:
    if given is not None:
        return _explicit("num_host_blocks", given, layouts, 0)
    if not config.host_cache_size:
        return (0,) * len(layouts)
    counts = _shared_out(config, layouts, config.host_cache_size)
    if max(counts) < 1:
        most = len(layouts) * max(layout.block_nbytes for layout in layouts)
        least = bisect_left(
            range(most), 1, key=lambda size: max(_shared_out(config, layouts, size))
        )
        raise ConfigurationError(
            f"host_cache_size: {config.host_cache_size} leaves no room for one block; give at "
            f"least {least} bytes, or 0"
        )
    return counts


def _slabs(
    config: KvCacheConfig, layouts: Sequence[KvCacheLayout], nbytes: int, *, round_up: bool
) -> SlabGeometry | None:
    slab = math.lcm(*(layout.block_nbytes for layout in layouts))
    count = -(-nbytes // slab) if round_up else nbytes // slab
    if len(layouts) == 1 or count < 2 * len(layouts):
        return None  # there is no other pool, or slabs are too coarse to move anything
    weights = _weights(config, layouts)
    shares = [max(1, int(weight * count)) for weight in weights]
    shares[weights.index(max(weights))] += count - sum(shares)  # the remainder of rounding
    owners = tuple(group for group, share in enumerate(shares) for _ in range(share))
    return SlabGeometry(slab, owners, tuple(slab // layout.block_nbytes for layout in layouts))
