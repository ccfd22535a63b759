"""Decoder layers of the Llama family on the CPU, with fewer and larger operations.

What a step of one token costs beside reading the weights is operations, and some hundred modules
around them. A lean layer computes the same as transformers' own, checked when the model is loaded;
layers of other kinds, or for which the check fails, stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from kvconnect.engine.model.attention import AttentionInput
from kvconnect.engine.model.seam import KvStep

__all__ = ["make_lean"]

_log = logging.getLogger(__name__)

_SERVED = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"})
_TILE = 512
"""Rows that the feed-forward part works on at a time: what it makes of them stays in the cache, and
is small enough for the allocator to keep, where each fresh page would cost a fault."""

_Norm: TypeAlias = Callable[[Tensor], Tensor]


def make_lean(model: nn.Module) -> int:
    """Have the layers of `model`, which lies on the CPU, compute in the lean way.

    Weights change their strides, not their values; those that are joined become views of one
    matrix, so that they take no more memory.

    Returns:
        How many layers are lean now.
    """
    tied = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    for module in model.modules():
        if type(module) is nn.Linear and id(module.weight) not in tied:
            module.weight.data = _laid_out(module.weight.data)
    return sum(_install(layer) for layer in model.modules() if type(layer).__name__ in _SERVED)


def _install(layer: nn.Module) -> bool:
    if any(type(one) is not nn.Linear for one in _projections(layer)):
        return False  # quantised, or an adapter around it
    lean = _LeanLayer(layer)
    if not _agrees(layer, lean):
        _log.warning("%s computes something else than expected", type(layer).__name__)
        return False
    layer.forward = lean
    return True


def _projections(layer: Any) -> Iterator[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)


class _LeanLayer:
    """One decoder layer; in place of its `forward`."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._layer_idx: int = attention.layer_idx
        self._dim: int = attention.head_dim
        self._heads: int = attention.q_proj.out_features // self._dim
        self._kv_heads: int = attention.k_proj.out_features // self._dim
        self._scaling: float = attention.scaling
        self._qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._o = attention.o_proj.weight, attention.o_proj.bias
        self._gate_up = _joined(mlp.gate_proj, mlp.up_proj)
        self._down = mlp.down_proj.weight, mlp.down_proj.bias
        self._act: Callable[[Tensor], Tensor] = mlp.act_fn
        self._before_attention = _norm(layer.input_layernorm)
        self._before_mlp = _norm(layer.post_attention_layernorm)

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        kv: KvStep,
        **_: object,
    ) -> Tensor:
        """As of the layer: ``[1, tokens, hidden]`` in and out."""
        rows = hidden_states[0]
        rows = rows + self._attend(self._before_attention(rows), position_embeddings, kv)
        for start in range(0, len(rows), _TILE):
            tile = rows[start : start + _TILE]
            gate, up = linear(self._before_mlp(tile), *self._gate_up).chunk(2, dim=-1)
            tile += linear(self._act(gate).mul_(up), *self._down)
        return rows[None]

    def _attend(self, rows: Tensor, positions: tuple[Tensor, Tensor], kv: KvStep) -> Tensor:
        heads, kv_heads = self._heads, self._kv_heads
        states = linear(rows, *self._qkv).view(len(rows), heads + 2 * kv_heads, self._dim)
        turned = _rotated(states[:, : heads + kv_heads], positions)
        given = AttentionInput(
            turned[:, :heads].transpose(0, 1)[None],
            turned[:, heads:].transpose(0, 1)[None],
            states[:, heads + kv_heads :].transpose(0, 1)[None],
            self._scaling,
            None,
        )
        return linear(kv.attend(self._layer_idx, given)[0].flatten(1), *self._o)


def _rotated(states: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
    # RoPE of queries and keys together, ``[tokens, heads, dim]``; halves that turn into each other.
    cos, sin = (one[0][:, None] for one in positions)
    half = states.shape[-1] // 2
    turned = states * cos
    turned[..., :half].addcmul_(states[..., half:], sin[..., :half], value=-1)
    turned[..., half:].addcmul_(states[..., :half], sin[..., half:])
    return turned


def _norm(module: Any) -> _Norm:
    weight: Tensor = module.weight
    epsilon: float = module.variance_epsilon
    if weight.dtype != torch.float32:
        own: _Norm = module.forward  # it rounds to float32 on the way, whatever comes in
        return own
    shape = tuple(weight.shape)
    return lambda rows: rms_norm(rows, shape, weight, epsilon)


def _joined(*parts: nn.Linear) -> tuple[Tensor, Tensor | None]:
    # One projection instead of several; the parts become views of it.
    weight = _laid_out(torch.cat([part.weight.data for part in parts]))
    views = torch.split_with_sizes(weight, [part.out_features for part in parts])
    for part, view in zip(parts, views, strict=True):
        part.weight.data = view
    biases: list[Tensor | None] = [part.bias for part in parts]
    given = [bias.data for bias in biases if bias is not None]
    return weight, torch.cat(given) if given else None


def _laid_out(weight: Tensor) -> Tensor:
    # A product with one row reads the matrix along its rows in memory: long ones are faster (by
    # half, from 512 to 2048 elements), so the longer side is the one that is contiguous.
    out_features, in_features = weight.shape
    return weight.t().contiguous().t() if out_features >= in_features else weight.contiguous()


class _Echo:
    """A ``kv=`` whose attention shows every head of what it was given."""

    def attend(self, layer_idx: int, given: AttentionInput) -> Tensor:
        groups = given.query.shape[1] // given.key.shape[1]
        key, value = (one.repeat_interleave(groups, 1) for one in (given.key, given.value))
        scaled = given.query if given.scaling is None else given.query * given.scaling
        return (scaled + key + 2 * value).transpose(1, 2)


def _agrees(layer: Any, lean: _LeanLayer) -> bool:
    weight: Tensor = layer.input_layernorm.weight
    generator = torch.Generator().manual_seed(0)
    hidden, cos, sin = (
        torch.randn(1, 5, size, generator=generator).to(weight.dtype)
        for size in (len(weight), layer.self_attn.head_dim, layer.self_attn.head_dim)
    )
    with torch.inference_mode():
        expected: Tensor = layer(
            hidden, attention_mask=None, position_embeddings=(cos, sin), kv=_Echo()
        )
        found = lean(hidden, position_embeddings=(cos, sin), kv=_Echo())
    tolerance = torch.finfo(weight.dtype).eps ** 0.5 * float(expected.abs().max())
    return bool(torch.allclose(found, expected, rtol=0, atol=tolerance))
