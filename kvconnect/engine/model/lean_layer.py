"""A decoder layer of the Llama family on the CPU, with fewer and larger operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvconnect.engine.model.projections import project, release
from kvconnect.engine.model.scores import AttentionInput
from kvconnect.engine.model.seam import KvStep

_TILE = 512
"""The rows that the feed-forward part computes at a time.

Their intermediate results stay in the processor's cache, and are small enough for the allocator to
reuse without page faults."""

_Norm: TypeAlias = Callable[[Tensor], Tensor]


class LeanStep:
    """The state that the layers of a stack share in one forward pass.

    Attributes:
        count: the number of tokens; further rows are padding.
        kv: the argument ``kv=`` of the model's call.
    """

    __slots__ = ("_cos", "_least", "_room", "_sin", "count", "kv")

    def __init__(
        self, count: int, positions: tuple[Tensor, Tensor], kv: KvStep, least_rows: int
    ) -> None:
        self.count = count
        self.kv = kv
        self._least = least_rows
        self._room: Tensor | None = None
        self._cos, sin = (one[:, None] for one in positions)
        self._sin = sin.chunk(2, -1)

    def turned(self, states: Tensor) -> Tensor:
        """Applies RoPE to queries and keys together, ``[1, heads, tokens, dim]``."""
        turned = states * self._cos  # and either half turns into the other
        (low, high), (first, second) = states.chunk(2, -1), turned.chunk(2, -1)
        first.addcmul_(high, self._sin[0], value=-1)
        second.addcmul_(low, self._sin[1])
        return turned

    def filled_up(self, rows: Tensor) -> Tensor:
        """Pads `rows` to as many as a product is fast with."""
        missing = self._least - len(rows)
        return rows if missing <= 0 else pad(rows, (0, 0, 0, missing))

    def attended(self, rows: Tensor) -> Tensor:
        """Pads `rows` in memory that the next layer writes again."""
        if len(rows) >= self._least:
            return rows
        if self._room is None:
            self._room = self.filled_up(rows)
        else:
            self._room[: len(rows)] = rows
        return self._room


class LeanLayer:
    """Computes one decoder layer.

    Attributes:
        is_last: true if only the results of the last tokens are used.
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
        self._before_attention = _norm(layer.input_layernorm)
        self._before_mlp = _norm(layer.post_attention_layernorm)
        self.least_rows = self._qkv.least_rows
        self.is_last = False

    def __call__(self, rows: Tensor, step: LeanStep) -> Tensor:
        """Maps ``[rows, hidden]`` to the same shape, padded.

        Where only the last tokens are used, it returns only these.
        """
        states = self._qkv(self._before_attention(rows))[: step.count]
        last_tokens = step.kv.last_tokens
        wanted = last_tokens if self.is_last and len(last_tokens) < step.count else None
        attended = self._attend(states, step, wanted)
        if wanted is not None:
            rows = step.filled_up(rows[wanted])
        rows = self._o.plus(step.attended(attended), rows)
        if len(rows) <= _TILE:
            return self._fed_forward(rows)
        return torch.cat([self._fed_forward(tile) for tile in torch.split(rows, _TILE)])

    def release(self) -> None:
        """Releases the weights: the layer's own forward is not called any more."""
        for parts, projection in zip(self._parts, self._projections, strict=True):
            for part in parts:
                release(part, projection)

    def _fed_forward(self, rows: Tensor) -> Tensor:
        normed = self._before_mlp(rows)
        return self._down.plus(self._up.times(normed, self._gate.silu(normed)), rows)

    def _attend(self, states: Tensor, step: LeanStep, wanted: Tensor | None) -> Tensor:
        heads, kv_heads = self._heads, self._kv_heads
        states = states.view(1, len(states), heads + 2 * kv_heads, self._dim).transpose(1, 2)
        turned, values = states.split_with_sizes((heads + kv_heads, kv_heads), 1)
        queries, keys = step.turned(turned).split_with_sizes((heads, kv_heads), 1)
        if wanted is not None:
            queries = queries[:, :, wanted]
        given = AttentionInput(queries, keys, values, self._scaling, None)
        return step.kv.attend(self._layer_idx, given)[0].flatten(1)


def _norm(module: Any) -> _Norm:
    weight: Tensor = module.weight
    epsilon: float = module.variance_epsilon
    if weight.dtype != torch.float32:
        own: _Norm = module.forward  # it rounds to float32 on the way, whatever comes in
        return own
    scaled = weight * len(weight) ** 0.5
    shift = torch.tensor((len(weight) * epsilon) ** 0.5)

    def normed(rows: Tensor) -> Tensor:
        # `rms_norm` is seven operations on the CPU, with squares as large as `rows` among them.
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        return rows.div(length.hypot_(shift)).mul_(scaled)

    return normed
