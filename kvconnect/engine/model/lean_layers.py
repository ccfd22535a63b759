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
from torch.nn.functional import pad

from kvconnect.engine.model.attention import AttentionInput
from kvconnect.engine.model.projections import close, laid_out, project, release
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

    Weights are packed, or change their strides; either way they are in memory once, beside those of
    a single layer while this runs. Weights that were packed cannot be read from `model` any more:
    modules keep their shape and dtype only.

    Returns:
        How many layers are lean now.
    """
    served = [layer for layer in model.modules() if type(layer).__name__ in _SERVED]
    count = sum(_install(layer) for layer in served)
    if served and isinstance(served[-1].forward, _LeanLayer):
        _cut_short(model, served[-1].forward)
    tied = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    head = getattr(model, "lm_head", None)
    for module in model.modules():
        if type(module) is not nn.Linear or module.weight.is_meta or id(module.weight) in tied:
            continue
        if module is head:
            projection = project(module)
            module.forward = projection
            release(module, projection)
        else:
            module.weight.data = laid_out(module.weight.data)
    return count


def _install(layer: nn.Module) -> bool:
    parts = list(_projections(layer))
    if any(type(one) is not nn.Linear for one in parts):
        return False  # quantised, or an adapter around it
    lean = _LeanLayer(layer)
    if not _agrees(layer, lean):
        _log.warning("%s computes something else than expected", type(layer).__name__)
        return False
    layer.forward = lean
    lean.release()
    return True


def _projections(layer: Any) -> Iterator[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)


class _LeanLayer:
    """One decoder layer; in place of its `forward`.

    Attributes:
        is_last: only what becomes of the last tokens is looked at.
    """

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._layer_idx: int = attention.layer_idx
        self._dim: int = attention.head_dim
        self._heads: int = attention.q_proj.out_features // self._dim
        self._kv_heads: int = attention.k_proj.out_features // self._dim
        self._scaling: float = attention.scaling
        self._parts = [
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (attention.o_proj,),
            (mlp.gate_proj,),
            (mlp.up_proj,),
            (mlp.down_proj,),
        ]
        self._projections = [project(*parts) for parts in self._parts]
        self._qkv, self._o, self._gate, self._up, self._down = self._projections
        self._act: Callable[[Tensor], Tensor] = mlp.act_fn
        self._before_attention = _norm(layer.input_layernorm)
        self._before_mlp = _norm(layer.post_attention_layernorm)
        self.is_last = False

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        kv: KvStep,
        **_: object,
    ) -> Tensor:
        """As of the layer: ``[1, tokens, hidden]`` in and out; tokens not looked at are zero."""
        count = hidden_states.shape[1]
        rows = self._filled_up(hidden_states[0])
        states = self._qkv(self._before_attention(rows))[:count]
        wanted = kv.last_tokens if self.is_last and len(kv.last_tokens) < count else None
        attended = self._attend(states, position_embeddings, kv, wanted)
        if wanted is not None:
            rows = self._filled_up(rows[wanted])
        rows = self._o.plus(self._filled_up(attended), rows)
        starts = range(0, len(rows), _TILE)
        tiles = [self._fed_forward(rows[start : start + _TILE]) for start in starts]
        rows = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
        if wanted is not None:
            blank = torch.zeros_like(hidden_states)
            blank[0, wanted] = rows[: len(wanted)]
            return blank
        return rows[None, :count]

    def release(self) -> None:
        """The layer's own forward is not called any more."""
        for parts, projection in zip(self._parts, self._projections, strict=True):
            for part in parts:
                release(part, projection)

    def _fed_forward(self, rows: Tensor) -> Tensor:
        normed = self._before_mlp(rows)
        return self._down.plus(self._up.times(normed, self._act(self._gate(normed))), rows)

    def _filled_up(self, rows: Tensor) -> Tensor:
        missing = self._qkv.least_rows - len(rows)
        return rows if missing <= 0 else pad(rows, (0, 0, 0, missing))

    def _attend(
        self,
        states: Tensor,
        positions: tuple[Tensor, Tensor],
        kv: KvStep,
        wanted: Tensor | None,
    ) -> Tensor:
        heads, kv_heads = self._heads, self._kv_heads
        states = states.view(len(states), heads + 2 * kv_heads, self._dim)
        turned = _rotated(states[:, : heads + kv_heads], positions)
        queries = turned[:, :heads] if wanted is None else turned[wanted, :heads]
        given = AttentionInput(
            queries.transpose(0, 1)[None],
            turned[:, heads:].transpose(0, 1)[None],
            states[:, heads + kv_heads :].transpose(0, 1)[None],
            self._scaling,
            None,
        )
        return kv.attend(self._layer_idx, given)[0].flatten(1)


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
    epsilons = torch.tensor(epsilon)
    share = 1 / len(weight)

    def normed(rows: Tensor) -> Tensor:
        # `rms_norm` is seven operations on the CPU, with squares as large as `rows` among them.
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        scale = torch.addcmul(epsilons, length, length, value=share).rsqrt_()
        return rows.mul(scale).mul_(weight)

    return normed


def _cut_short(model: nn.Module, last: _LeanLayer) -> None:
    # Keys and values of all tokens are cached, but behind the last layer only the tokens count
    # whose logits are wanted: none of the others is attended from, or fed forward.
    logits = []
    for last.is_last in (False, True):
        with torch.inference_mode():
            output = model(
                input_ids=torch.arange(5)[None],
                position_ids=torch.arange(5)[None],
                use_cache=False,
                kv=_Echo(),
                logits_to_keep=_Echo.last_tokens,
            )
        logits.append(output.logits)
    last.is_last = close(*logits)


class _Echo:
    """A ``kv=`` whose attention shows every head of what it was given."""

    last_tokens = torch.tensor([1, 4])

    def attend(self, layer_idx: int, given: AttentionInput) -> Tensor:
        groups = given.query.shape[1] // given.key.shape[1]
        key, value = (one.repeat_interleave(groups, 1) for one in (given.key, given.value))
        if given.query.shape[2] < key.shape[2]:
            key, value = key[:, :, self.last_tokens], value[:, :, self.last_tokens]
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
    return close(found, expected)
