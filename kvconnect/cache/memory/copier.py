"""Carries out the copies that the block manager orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

from torch import Tensor

from kvconnect.cache.memory.copy_streams import CopyStreams, CudaStreams
from kvconnect.errors import ConfigurationError
from kvconnect.kernels.block_copy import copy_pairs
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.blocks.transfer import Transfer
from kvconnect.layout import KvCacheLayout
from kvconnect.trace import count


class BlockCopier(Protocol):
    """Copies between blocks, in the order of the calls.

    Later computations read the copied data, and overwrite a source only after it was copied. On
    CUDA this holds for the stream that is current during the call. Ids are any sequences of
    integers, as many sources as targets. The targets of one call are distinct, and none is a source
    of the same call.
    """

    def onboard(self, group: int, host_ids: Sequence[int], ids: Sequence[int]) -> None:
        """Copies secondary blocks `host_ids` of a pool group to its primary blocks `ids`."""

    def offload(self, group: int, ids: Sequence[int], host_ids: Sequence[int]) -> None:
        """Copies primary blocks `ids` of a pool group to its secondary blocks `host_ids`."""

    def copy_tokens(
        self, group: int, source: int, target: int, num_tokens: int, *, from_host: bool = False
    ) -> None:
        """Copies the first `num_tokens` tokens of block `source` to primary block `target`.

        All layers, keys and values are copied. The rest of the target is unspecified. `source` is a
        primary block, or a secondary one if `from_host`.
        """

    def move(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies primary blocks `sources` to primary blocks `targets`, when slabs change pools."""


class TensorCopier:
    """Copies within and between the pools of a device and their host tier.

    Host traffic is counted as ``cache.onboard`` and ``cache.offload``.

    On the CPU a copy is done when the method returns. A thread would gain nothing there: the
    forward pass writes to the offloaded blocks at once. On CUDA, copies run on streams of their
    own, see `copy_streams`, and no method blocks.

    The class is not thread-safe. No method may be called while a CUDA graph is captured. After an
    exception of `torch`, some, all or none of the call's targets are written.

    Args:
        pools: the primary pool of each group, ``[num_blocks, num_layers, kv_factor, elements]``,
            all on one device. They may be views of one arena, see `pool_view`.
        host_pools: the secondary pool of each group, ``None`` for a group without one; page-locked
            if `pools` are on CUDA.
        layouts: the layout of each group.
        streams: orders the copies on CUDA; made for the device by default.

    Attributes:
        onboarded_tokens: the tokens that pool group 0 has onboarded from the host so far.

    Raises:
        ConfigurationError: the pools do not fit `layouts` or each other. Copies raise it (it is a
            ``ValueError``), or ``IndexError``, for blocks that do not exist; then that call copied
            nothing.
    """

    def __init__(
        self,
        pools: Sequence[Tensor],
        host_pools: Sequence[Tensor | None],
        layouts: Sequence[KvCacheLayout],
        *,
        streams: CopyStreams | None = None,
    ) -> None:
        _check_pools(pools, host_pools, layouts)
        device = pools[0].device
        if streams is None and device.type == "cuda":
            streams = CopyStreams(CudaStreams(device))
        self._streams = streams
        self._layouts = tuple(layouts)
        self.onboarded_tokens = 0
        everything = [*zip(pools, layouts, strict=True), *zip(host_pools, layouts, strict=True)]
        numbered = iter(_number_slots([(pool, of) for pool, of in everything if pool is not None]))
        self._pools = [next(numbered) for _ in pools]
        self._host_pools = [None if pool is None else next(numbered) for pool in host_pools]

    def onboard(self, group: int, host_ids: Sequence[int], ids: Sequence[int]) -> None:
        """Copies host blocks `host_ids` to primary blocks `ids`, as `BlockCopier` describes."""
        host, pool = self._host(group), self._pools[group]
        copy = partial(copy_pairs, host.kv, pool.kv, host_ids, ids)
        self._load(copy, (host, host_ids), (pool, ids))
        self._count_onboard(group, len(ids), len(ids) * self._layouts[group].tokens_per_block)

    def offload(self, group: int, ids: Sequence[int], host_ids: Sequence[int]) -> None:
        """Copies primary blocks `ids` to host blocks `host_ids`, as `BlockCopier` describes."""
        host, pool = self._host(group), self._pools[group]
        copy = partial(copy_pairs, pool.kv, host.kv, ids, host_ids)
        if self._streams is None:
            copy()
        else:
            self._streams.store(copy, pool.slots(ids) + host.slots(host_ids))
        count("cache.offload", blocks=len(ids))

    def copy_tokens(
        self, group: int, source: int, target: int, num_tokens: int, *, from_host: bool = False
    ) -> None:
        """Copies the first tokens of a block; the rest of the target is unchanged."""
        pool = self._pools[group]
        origin = self._host(group) if from_host else pool
        copy = partial(copy_pairs, origin.kv, pool.kv, [source], [target], [num_tokens])
        if from_host:
            self._load(copy, (origin, [source]), (pool, [target]))
            self._count_onboard(group, 1, num_tokens)
        else:
            self._load(copy, (pool, [target]))

    def move(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies primary blocks `sources` to primary blocks `targets`."""
        pool = self._pools[group]
        copy = partial(copy_pairs, pool.kv, pool.kv, sources, targets)
        self._load(copy, (pool, targets))

    def together(self) -> AbstractContextManager[None]:
        """Returns a context whose copies form one batch: on CUDA, loads and stores then overlap.

        No other work on blocks may be launched before the context ends. Contexts nest.
        """
        return nullcontext() if self._streams is None else self._streams.together()

    def _load(self, copy: Callable[[], Transfer], *used: tuple[_BlockSlots, Sequence[int]]) -> None:
        if self._streams is None:
            copy()
        else:
            self._streams.load(copy, [slot for blocks, ids in used for slot in blocks.slots(ids)])

    def _count_onboard(self, group: int, blocks: int, num_tokens: int) -> None:
        count("cache.onboard", blocks=blocks)
        if group == 0:
            self.onboarded_tokens += num_tokens

    def _host(self, group: int) -> _BlockSlots:
        host = self._host_pools[group]
        if host is None:
            raise ConfigurationError(f"host_pools: group {group} has no host tier")
        return host


def _check_pools(
    pools: Sequence[Tensor],
    host_pools: Sequence[Tensor | None],
    layouts: Sequence[KvCacheLayout],
) -> None:
    if not len(pools) == len(host_pools) == len(layouts) > 0:
        raise ConfigurationError(
            f"pools: {len(pools)} pools, {len(host_pools)} host pools and {len(layouts)} layouts; "
            "one of each is needed for every group, and at least one group"
        )
    device = pools[0].device
    for group, (pool, host, layout) in enumerate(zip(pools, host_pools, layouts, strict=True)):
        _check_pool(f"pools[{group}]", pool, layout)
        if pool.device != device:
            raise ConfigurationError(f"pools[{group}]: on {pool.device}, the first is on {device}")
        if host is None:
            continue
        _check_pool(f"host_pools[{group}]", host, layout)
        if host.device.type != "cpu" or (
            device.type == "cuda" and host.numel() and not host.is_pinned()
        ):
            raise ConfigurationError(
                f"host_pools[{group}]: must be host memory as allocate_host_pool makes it, "
                "page-locked for CUDA"
            )


def _check_pool(name: str, pool: Tensor, layout: KvCacheLayout) -> None:
    shape = layout.flat_shape(len(pool))
    if pool.shape != shape or pool.dtype != layout.dtype or not pool.is_contiguous():
        raise ConfigurationError(
            f"{name}: {layout.dtype} {shape} in one piece is needed, this is {pool.dtype} "
            f"{tuple(pool.shape)}"
        )


class _BlockSlots:
    """The slots of the blocks of one pool. A slot is a numbered piece of memory.

    Attributes:
        kv: the pool, in the form that copies need.
    """

    def __init__(
        self, pool: Tensor, layout: KvCacheLayout, first_slot: int, slot_nbytes: int
    ) -> None:
        self.kv = PagedKv.from_pool(pool, layout)
        self._first_slot = first_slot
        self._slot_nbytes = slot_nbytes
        self._offset = pool.data_ptr() - pool.untyped_storage().data_ptr()

    def slots(self, ids: Sequence[int]) -> list[int]:
        """Returns the numbers of the slots that the blocks `ids` overlap, perhaps repeated."""
        first, size, nbytes = self._first_slot, self._slot_nbytes, self.kv.block_nbytes
        if size == nbytes and not self._offset:
            return [first + block_id for block_id in ids]
        starts = [self._offset + block_id * nbytes for block_id in ids]
        return [
            slot
            for start in starts
            for slot in range(first + start // size, first + (start + nbytes - 1) // size + 1)
        ]


def _number_slots(pools: Sequence[tuple[Tensor, KvCacheLayout]]) -> list[_BlockSlots]:
    """Returns the slots of each pool, such that two blocks that share a byte have a common slot.

    Pools in one arena get slots of the size of their largest block. Neighbouring blocks may then
    have a common slot without a common byte, which only costs a wait.
    """
    sizes: dict[int, int] = {}
    for pool, layout in pools:
        memory = pool.untyped_storage().data_ptr()
        sizes[memory] = max(sizes.get(memory, 1), layout.block_nbytes)
    firsts: dict[int, int] = {}
    next_slot = 0
    numbered = []
    for pool, layout in pools:
        storage = pool.untyped_storage()
        memory = storage.data_ptr()
        if memory not in firsts:
            firsts[memory] = next_slot
            next_slot += -(-storage.nbytes() // sizes[memory])
        numbered.append(_BlockSlots(pool, layout, firsts[memory], sizes[memory]))
    return numbered
