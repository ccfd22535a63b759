"""Replaces decoder layers of the Llama family on the CPU by fewer and larger operations.

Besides reading the weights, a step of one token costs operations, and some hundred modules
around them. A lean layer computes the same as transformers' own, checked when the model is loaded;
layers of other kinds, or for which the check fails, stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kvconnect.engine.model.projections import close, laid_out, project, release
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


_log = logging.getLogger(__name__)

_SERVED = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"})
_ACTIVATIONS = frozenset({"SiLU", "SiLUActivation"})


def make_lean(model: nn.Module) -> int:
    """Makes the layers of `model`, which lies on the CPU, compute in the lean way.

    Consecutive ones become a single module of their list. Weights are packed, or change their
    strides; either way they are in memory once, beside those of a single layer while this runs.
    Weights that were packed cannot be read from `model` any more: modules keep their shape and
    dtype only.

    Returns:
        How many layers are lean now.
    """
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList)]
    stacks = [stack for layers in lists for stack in _stacked(layers)]
    if stacks and stacks[-1] in {layers[-1] for layers in lists if len(layers)}:
        _cut_short(model, stacks[-1].last)
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
    return sum(len(stack.layers) for stack in stacks)


def _stacked(layers: nn.ModuleList) -> list[LeanStack]:
    """Replaces runs of layers that can be lean by stacks."""
    if not any(type(layer).__name__ in _SERVED for layer in layers):
        return []
    stacks: list[LeanStack] = []
    kept: list[nn.Module] = []
    for layer in layers:
        lean = _lean(layer) if type(layer).__name__ in _SERVED else None
        if lean is None:
            kept.append(layer)
        elif kept and isinstance(kept[-1], LeanStack):
            kept[-1].append(layer, lean)
        else:
            stacks.append(LeanStack(layer, lean))
            kept.append(stacks[-1])
    del layers[:]
    layers.extend(kept)
    return stacks


def _lean(layer: Any) -> LeanLayer | None:
    if any(type(one) is not nn.Linear for one in _projections(layer)):
        return None  # quantised, or an adapter around it
    if type(layer.mlp.act_fn).__name__ not in _ACTIVATIONS:
        return None
    lean = LeanLayer(layer)
    if not _agrees(layer, lean):
        _log.warning("%s computes something else than expected", type(layer).__name__)
        return None
    lean.release()
    return lean


def _projections(layer: Any) -> Iterator[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)


class LeanStack(nn.Module):
    """A stack of consecutive decoder layers, in place of the first of them.

    Attributes:
        layers: the original ones; their parameters, some of which are released.
        lean: the layers that compute instead.
    """

    def __init__(self, layer: nn.Module, lean: LeanLayer) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])
        self.lean = [lean]

    def append(self, layer: nn.Module, lean: LeanLayer) -> None:
        """Appends a layer."""
        self.layers.append(layer)
        self.lean.append(lean)

    @property
    def last(self) -> LeanLayer:
        """The last layer."""
        return self.lean[-1]

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        kv: KvStep,
        **_: object,
    ) -> Tensor:
        """Computes like a layer: ``[1, tokens, hidden]`` in and out; unused tokens are zero."""
        return _computed(self.lean, hidden_states, position_embeddings, kv)


def _computed(
    layers: Sequence[LeanLayer],
    hidden_states: Tensor,
    positions: tuple[Tensor, Tensor],
    kv: KvStep,
) -> Tensor:
    count = hidden_states.shape[1]
    step = LeanStep(count, positions, kv, layers[0].least_rows)
    rows = step.filled_up(hidden_states[0])
    for layer in layers:
        rows = layer(rows, step)
    if layers[-1].is_last and len(kv.last_tokens) < count:
        blank = torch.zeros_like(hidden_states)
        blank[0, kv.last_tokens] = rows[: len(kv.last_tokens)]
        return blank
    return rows[None, :count]


def _cut_short(model: nn.Module, last: LeanLayer) -> None:
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


def _agrees(layer: Any, lean: LeanLayer) -> bool:
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
        found = _computed([lean], hidden, (cos, sin), _Echo())
    return close(found, expected)
