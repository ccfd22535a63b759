"""The host memory of SGLang as blocks of a store: pages in any layout, and recurrent states."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvconnect.backend import DEFAULT_RETENTION_PRIORITY
from kvconnect.connector.io.blocking import StoreAccess
from kvconnect.connector.io.orders import BlockLoad, BlockSave
from kvconnect.connector.io.strided import StridedPlanes
from kvconnect.errors import UnsupportedModel
from kvconnect.integrations.core.memory import planes_of
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout, StateTensor

_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@dataclass(frozen=True, slots=True, eq=False)
class HostPool:
    """A host pool of SGLang's, of keys and values or of latents (MLA).

    Attributes:
        layout: the layout of a page, with this rank's heads and layers.
        planes: the pool's own memory.
    """

    layout: KvCacheLayout
    planes: PagedKv | StridedPlanes

    @classmethod
    def of(cls, pool: Any, *, is_mla: bool) -> HostPool:
        """Reads an ``MHATokenToKVPoolHost`` or an ``MLATokenToKVPoolHost``.

        Args:
            pool: registered by SGLang.
            is_mla: whether it holds latents.

        Raises:
            UnsupportedModel: the pool holds something else, or its shape is unexpected.
            ConfigurationError: a page has one token.
        """
        name = type(pool).__name__
        if pool.layout not in _LAYOUTS or getattr(pool, "kv_buffer", None) is None:
            raise UnsupportedModel(
                f"{name}: hicache-mem-layout {pool.layout!r} is not served; use one of "
                f"{', '.join(_LAYOUTS)}"
            )
        if getattr(pool, "target_layer_num", pool.layer_num) != pool.layer_num:
            raise UnsupportedModel(
                f"{name}: layers of a draft model are packed into its pages, and keys do not "
                "name that model"
            )
        layout = _layout(pool, is_mla=is_mla)
        planes = [_planes(pool, layer, is_mla=is_mla) for layer in range(pool.layer_num)]
        found = cls(layout, planes_of(planes, layout, pool.page_num, name=name))
        found.check_against(pool)
        return found

    def check_against(self, pool: Any) -> None:
        """Compares the planes with SGLang's description of its first and its last page.

        Raises:
            UnsupportedModel: a page holds more, or something else, than keys and values.
        """
        size, last = self.layout.tokens_per_block, pool.page_num - 1
        for page in {0, last}:
            indices = torch.arange(page * size, (page + 1) * size)
            pointers, sizes = pool.get_page_buffer_meta(indices)
            spans = [(at, at + length) for at, length in zip(pointers, sizes, strict=True)]
            inside = all(
                any(low <= plane[page].data_ptr() < high for low, high in spans)
                for plane in self.planes.views
            )
            if sum(sizes) != self.layout.block_nbytes or not inside:
                raise UnsupportedModel(
                    f"{type(pool).__name__}: SGLang moves {sum(sizes)} bytes for a page, keys and "
                    f"values of {self.layout.num_layers} layers are {self.layout.block_nbytes}: "
                    "this pool cannot be served"
                )

    def pages(self, host_indices: Tensor) -> list[int]:
        """Returns the page numbers of `host_indices`, which are token indices page by page."""
        return (
            host_indices[:: self.layout.tokens_per_block] // self.layout.tokens_per_block
        ).tolist()


def _layout(pool: Any, *, is_mla: bool) -> KvCacheLayout:
    heads, key_dim, value_dim = (
        (1, pool.kv_cache_dim, 0)
        if is_mla
        else (pool.head_num, pool.head_dim, getattr(pool, "v_head_dim", pool.head_dim))
    )
    first = pool.start_layer or 0
    return KvCacheLayout(
        num_layers=pool.layer_num,
        num_kv_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        tokens_per_block=pool.page_size,
        dtype=pool.dtype,
        layers=tuple(range(first, first + pool.layer_num)) if first else (),
    )


def _planes(pool: Any, layer: int, *, is_mla: bool) -> tuple[Tensor, Tensor] | tuple[Tensor]:
    if is_mla:
        return (_plane(pool.kv_buffer, pool, layer),)
    return (_plane(pool.k_buffer, pool, layer), _plane(pool.v_buffer, pool, layer))


def _plane(buffer: Tensor, pool: Any, layer: int) -> Tensor:
    """Returns keys or values of a layer, ``[pages, tokens, heads, dim]``."""
    by_page = (pool.page_num, pool.page_size)
    if pool.layout == "layer_first":
        return torch.unflatten(buffer[layer], 0, by_page)
    if pool.layout == "page_first":
        return torch.unflatten(buffer[:, layer], 0, by_page)
    if pool.layout == "page_first_direct":
        return buffer[:, layer]
    return buffer[:, :, :, layer].transpose(1, 2)


_SAVED, _LOADED = 0, 1
"""The blocks of the bounce memory: one for each direction."""


@dataclass(frozen=True, slots=True, eq=False)
class HostStates:
    """A ``MambaPoolHost``, whose slots each hold the state of all recurrent layers.

    SGLang keeps the tensors of a state in several buffers, and a stored block is one run of bytes.
    So a state is copied through one block of bounce memory for each direction. A state that is
    loaded in part never reaches SGLang's memory. Thread-safe.

    Attributes:
        layout: the layout of a state, with this rank's part of each tensor.
        parts: the layouts of the blocks that a store keeps for a state.
        planes: the bounce memory of each part.
    """

    layout: KvCacheLayout
    parts: tuple[KvCacheLayout, ...]
    planes: tuple[PagedKv | StridedPlanes, ...]
    _pairs: tuple[tuple[Tensor, Tensor], ...]  # rows of bytes: [slots, layers, n], [2, layers, n]
    _saving: threading.Lock = field(default_factory=threading.Lock)
    _loading: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, pool: Any, tokens_per_page: int) -> HostStates:
        """Reads a ``MambaPoolHost``.

        Args:
            pool: registered by SGLang.
            tokens_per_page: the tokens of a page of keys and values; a state stands at its end.

        Raises:
            UnsupportedModel: the pool holds something else, or its shape is unexpected.
        """
        buffers = _buffers(pool)
        num_layers = pool.num_mamba_layers
        layout = KvCacheLayout.of_states(
            [
                StateTensor(layer, name, tuple(buffer.shape[3:]), buffer.dtype)
                for layer in range(num_layers)
                for name, buffer in buffers.items()
            ],
            tokens_per_page,
        )
        bounce = torch.zeros((2, num_layers, layout.layer_nbytes), dtype=torch.uint8)
        pairs = tuple(
            (
                buffers[one.name].view(len(buffers[one.name]), num_layers, -1).view(torch.uint8),
                bounce[:, :, at : at + one.nbytes],
            )
            for one, at in layout.state_offsets(0)
        )
        parts = layout.divided()
        rows = bounce.view(2, num_layers, tokens_per_page, 1, layout.key_dim)
        planes = [
            planes_of(
                [(rows[:, layer],) for layer in part.layer_numbers], part, 2, name="host pool mamba"
            )
            for part in parts
        ]
        return cls(layout, parts, tuple(planes), pairs)

    @property
    def groups(self) -> range:
        """The pool groups of the parts. Group 0 is that of keys and values."""
        return range(1, 1 + len(self.parts))

    def save(
        self, access: StoreAccess, keys: Sequence[BlockKey], slots: Tensor, *, namespace: bytes
    ) -> list[bool]:
        """Copies the states of `slots`, to be written in the background.

        Args:
            access: the store.
            keys: the key of the page before the first state's, or the root; then the keys of the
                pages at whose ends the states stand.
            slots: the index of each state in SGLang's pool.
            namespace: see `StoreAccess.save`.

        Returns:
            False for each state of which a part has no room; it is not found later.

        Raises:
            IndexError: there is no such slot; the states before it are being saved.
        """
        found = []
        for parent, key, slot in zip(keys, keys[1:], slots.tolist(), strict=False):
            blocks = [
                BlockSave(key, parent, 0, _SAVED, None, DEFAULT_RETENTION_PRIORITY, group)
                for group in self.groups
            ]
            with self._saving:
                for states, bounce in self._pairs:
                    bounce[_SAVED].copy_(states[slot])
                found.append(access.save(blocks, namespace=namespace) == len(blocks))
        return found

    def load(self, access: StoreAccess, keys: Sequence[BlockKey], slots: Tensor) -> list[bool]:
        """Fills `slots` with the states at the ends of the pages of `keys`.

        Returns:
            False for each state of which a part is missing or damaged; its slot is unchanged.

        Raises:
            IndexError: there is no such slot.
        """
        found = []
        for key, slot in zip(keys, slots.tolist(), strict=True):
            blocks = [BlockLoad(key, _LOADED, group) for group in self.groups]
            with self._loading:
                is_whole = access.load_all([blocks]) == [len(blocks)]
                for states, bounce in self._pairs if is_whole else ():
                    states[slot].copy_(bounce[_LOADED])
            found.append(is_whole)
        return found


def is_last_state(transfer: Any) -> bool:
    """Returns whether a ``PoolTransfer`` is of the state at the end of a prefix, and no other."""
    return (
        transfer.name == "mamba"
        and transfer.hit_policy == "trailing_pages"
        and len(transfer.keys or ()) == 1
    )


def has_slots(transfer: Any) -> bool:
    """Returns whether a ``PoolTransfer`` is of states, with a slot for each of its keys."""
    keys, slots = transfer.keys or (), transfer.host_indices
    return transfer.name == "mamba" and slots is not None and slots.numel() == len(keys)


def _buffers(pool: Any) -> dict[str, Tensor]:
    """Returns SGLang's buffers of states by name, each ``[slots, layers, 1, *shape]``.

    Raises:
        UnsupportedModel: a slot holds more than these, or they are of another form.
    """
    reasons = {
        "layers of a draft model are packed into its states": pool.mtp_draft_buffer_infos,
        "its slots hold side states, which have no layer": pool.slot_state_buffers,
        f"hicache-mem-layout {pool.layout!r} is not served; use page_first or page_first_direct": (
            pool.layout not in ("page_first", "page_first_direct")
        ),
        f"a page has {pool.page_size} states": pool.page_size != 1,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedModel(f"host pool 'mamba': {reason}; recurrent states are not served")
    found = {"temporal": pool.temporal_buffer}
    found |= {f"conv{number}": buffer for number, buffer in enumerate(pool.conv_buffer)}
    found = {name: buffer for name, buffer in found.items() if buffer.numel()}
    _check(pool, found)
    return found


def _check(pool: Any, buffers: dict[str, Tensor]) -> None:
    """Compares `buffers` with SGLang's description of its first and its last slot.

    Raises:
        UnsupportedModel: a slot holds more, or something else, than the tensors of a state.
    """
    expected = (pool.page_num, pool.num_mamba_layers, 1)
    for name, buffer in buffers.items():
        if (
            tuple(buffer.shape[:3]) != expected
            or not buffer.is_contiguous()
            or buffer.device.type != "cpu"
        ):
            raise UnsupportedModel(
                f"host pool 'mamba': {name} of shape {tuple(buffer.shape)} and strides "
                f"{buffer.stride()} on {buffer.device}; {expected} and a state's shape, contiguous "
                "in host memory, are served"
            )
    for slot in {0, pool.page_num - 1}:
        found = [(buffer[slot].data_ptr(), buffer[slot].nbytes) for buffer in buffers.values()]
        told = _described(pool, slot)
        if sorted(told) != sorted(found):
            raise UnsupportedModel(
                f"host pool 'mamba': SGLang moves {sum(size for _, size in told)} bytes for a "
                f"state, its tensors are {sum(size for _, size in found)}: this pool cannot be "
                "served"
            )


def _described(pool: Any, slot: int) -> Sequence[tuple[int, int]]:
    pointers, sizes = pool.get_page_buffer_meta(torch.tensor([slot]))
    return list(zip(pointers, sizes, strict=True))
