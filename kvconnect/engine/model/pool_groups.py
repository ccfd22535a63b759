"""Groups the layers that share a pool: those with one window and one shape of keys and values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvconnect.config import KvCacheConfig
from kvconnect.engine.model.forward_step import CachedLayer
from kvconnect.engine.model.model import Model
from kvconnect.engine.model.pages import LayerPages
from kvconnect.engine.model.seam import LayerShape
from kvconnect.errors import UnsupportedModel
from kvconnect.layout import KvCacheLayout, StateTensor


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """The layout of a model's layers in the KV cache.

    Attributes:
        layouts: the layout of each pool group, in order.
        windows: the attention window of each layer; ``None``: full attention.
        narrowed: true if the window of a layer is shorter than its model's.
        num_kv_heads: the KV heads of each group's layers on all ranks together.
        computes_in: the model's dtype, if the cache has another one; else ``None``.
    """

    layouts: tuple[KvCacheLayout, ...]
    windows: tuple[int | None, ...]
    narrowed: bool
    num_kv_heads: tuple[int, ...]
    computes_in: torch.dtype | None = None

    @property
    def whole_layouts(self) -> tuple[KvCacheLayout, ...]:
        """The `layouts` of one rank with all heads, which are part of keys."""
        return tuple(
            replace(layout, num_kv_heads=heads)
            for layout, heads in zip(self.layouts, self.num_kv_heads, strict=True)
        )

    @property
    def stored_layouts(self) -> tuple[KvCacheLayout, ...]:
        """The `layouts` as a connector gets them: large blocks of states are divided."""
        return tuple(part for layout in self.layouts for part in layout.divided())

    @property
    def stored_kv_heads(self) -> tuple[int, ...]:
        """The `num_kv_heads` of the `stored_layouts`."""
        pairs = zip(self.layouts, self.num_kv_heads, strict=True)
        return tuple(heads for layout, heads in pairs for _ in layout.divided())

    @classmethod
    def of(
        cls, model: Model, config: KvCacheConfig, *, window_pools: bool, states: bool = False
    ) -> CacheGeometry:
        """Returns the geometry of `model` under `config`.

        Args:
            model: the model.
            config: the configuration of the cache.
            window_pools: true if the cache manager supports several pool groups; otherwise there is
                one, and windows are masks only.
            states: true if the cache manager keeps snapshots of recurrent states.

        Raises:
            UnsupportedModel: there is one pool, and layers differ in what they store; or windows
                are configured for layers that choose tokens by an index, or that compute attention
                themselves.
        """
        if config.max_attention_window and any(layer.is_index for layer in model.layers):
            raise UnsupportedModel(
                "max_attention_window: this model's layers choose the tokens that they attend to "
                "among all tokens of a sequence; leave it out"
            )
        limit = model.position_limit
        longest = None if limit is None else limit.num_tokens
        windows = effective_windows(model.layers, config.max_attention_window, longest)
        dtype = torch.float8_e4m3fn if config.dtype == "fp8" else model.dtype
        size = config.tokens_per_block
        more = _state_layouts(model, size) if states else ()
        if not model.layers:
            layouts = (KvCacheLayout.of_counts(size, dtype), *more)
            return cls(layouts, (), narrowed=False, num_kv_heads=(1,) * len(layouts))
        # In one pool a sliding window is a mask only.
        pooled = windows if window_pools else (None,) * len(windows)
        layouts = group_layouts(model.layers, pooled, tokens_per_block=size, dtype=dtype)
        if not window_pools:
            _check_alike(layouts)
        heads = tuple(model.whole_layers[one.layer_numbers[0]].num_kv_heads for one in layouts)
        for layout, count in zip(layouts, heads, strict=True):
            if any(model.whole_layers[one].num_kv_heads != count for one in layout.layer_numbers):
                raise UnsupportedModel(
                    "tensor_parallel_size: layers that are alike on one rank have different "
                    "numbers of KV heads; use 1"
                )
        narrowed = windows != effective_windows(model.layers, None, longest)
        if narrowed and model.owns_attention:
            raise UnsupportedModel(
                "max_attention_window: this model computes attention itself, over all tokens of a "
                "sequence; leave it out"
            )
        computes_in = None if dtype == model.dtype else model.dtype
        return cls((*layouts, *more), windows, narrowed, heads + (1,) * len(more), computes_in)

    def digest(self, model_digest: bytes) -> bytes:
        """Returns the digest of the model in keys, 32 bytes.

        Windows of the cache's own, and another dtype than the cache's to compute in, make other
        keys and values of the same weights. Other engines order the elements of a latent in
        another way, under an equal layout.
        """
        digest = model_digest
        if any(layout.is_latent for layout in self.layouts):
            digest = _with(digest, "latents of transformers")
        if self.narrowed:
            digest = _with(digest, repr(self.windows))
        if self.computes_in is not None:
            digest = _with(digest, f"computes in {self.computes_in}")
        return digest

    def cached_layers(
        self,
        buffers: Callable[[int], Tensor | tuple[Tensor, Tensor]],
        num_blocks: int,
        dtype: torch.dtype,
    ) -> list[CachedLayer]:
        """Returns the memory of each layer of the model, which computes in `dtype`.

        Args:
            buffers: returns a layer's memory; see `BaseKVCacheManager.get_buffers`.
            num_blocks: the number of blocks of group 0.
            dtype: the dtype that the model computes in.

        Raises:
            ConfigurationError: a layer's memory does not have the layout's shape.
        """
        if not self.windows:
            return []
        expected = num_blocks if len(self.layouts) == 1 else None
        layers: dict[int, CachedLayer] = {}
        for group, layout in enumerate(self.layouts):
            if layout.kind == "state":
                continue
            for number in layout.layer_numbers:
                pages = LayerPages(buffers(number), layout, expected, dtype)
                layers[number] = CachedLayer(pages, group, self.windows[number])
        return [layers[number] for number in sorted(layers)]


def _with(digest: bytes, more: str) -> bytes:
    return hashlib.blake2b(digest + more.encode(), digest_size=32).digest()


def effective_windows(
    layers: Sequence[LayerShape], given: Sequence[int] | None, longest: int | None
) -> tuple[int | None, ...]:
    """Returns the window of each layer: its own, or a shorter, configured one.

    Args:
        layers: the layers of the model.
        given: ``KvCacheConfig.max_attention_window``, repeated over the layers.
        longest: tokens of the longest sequence; a window of at least this length counts as full
            attention. ``None``: no limit.
    """
    windows: list[int | None] = []
    for index, layer in enumerate(layers):
        limits = [] if layer.window is None else [layer.window]
        if given:
            limits.append(given[index % len(given)])
        window = min(limits, default=None)
        unlimited = window is None or (longest is not None and window >= longest)
        windows.append(None if unlimited else window)
    return tuple(windows)


def group_layouts(
    layers: Sequence[LayerShape],
    windows: Sequence[int | None],
    *,
    tokens_per_block: int,
    dtype: torch.dtype,
) -> tuple[KvCacheLayout, ...]:
    """Returns a layout for each set of layers that share a pool: full attention, then by window."""
    members: dict[tuple[int | None, int, int, int], list[int]] = {}
    for index, (layer, window) in enumerate(zip(layers, windows, strict=True)):
        key = (window, layer.num_kv_heads, layer.key_dim, layer.value_dim)
        members.setdefault(key, []).append(index)
    made = [
        KvCacheLayout(
            num_layers=len(numbers),
            num_kv_heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            tokens_per_block=tokens_per_block,
            dtype=dtype,
            window=window,
            layers=tuple(numbers),
        )
        for (window, heads, key_dim, value_dim), numbers in members.items()
    ]
    return tuple(sorted(made, key=lambda one: -torch.inf if one.window is None else -one.window))


def state_layers(model: Model) -> dict[int, int]:
    """Returns the recurrent layers of `model`: the number in the cache by the model's number.

    Numbers in the cache follow those of the attention layers, because a layer may be both.
    """
    first = max(1, len(model.layers))
    numbers = sorted({one.key.layer_idx for one in model.states})
    return {number: first + index for index, number in enumerate(numbers)}


def _state_layouts(model: Model, tokens_per_block: int) -> tuple[KvCacheLayout, ...]:
    numbers = state_layers(model)
    tensors = [
        StateTensor(numbers[one.key.layer_idx], one.key.name, one.shape, one.dtype)
        for one in sorted(model.states, key=lambda one: one.key.layer_idx)
    ]
    return (KvCacheLayout.of_states(tensors, tokens_per_block),) if tensors else ()


def _check_alike(layouts: Sequence[KvCacheLayout]) -> None:
    if len(layouts) > 1:
        shapes = [(one.num_kv_heads, one.key_dim, one.value_dim) for one in layouts]
        raise UnsupportedModel(
            f"layers differ in KV heads or dimensions ({', '.join(map(str, shapes))}): the cache "
            "manager has one pool, which cannot hold them (supports_window_pools is False)"
        )
