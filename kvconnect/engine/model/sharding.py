"""Cuts a model's weights into the parts of tensor-parallel ranks, by transformers' own plan.

The plan (``base_model_tp_plan``) names, for each module, how its weights are divided: ``colwise``
by outputs, ``rowwise`` by inputs with the ranks' results added up. The division of modules whose
input and output every rank has whole (embeddings, the head, projections that are gathered) only
saves memory: those stay whole here.

Where there are fewer KV heads than ranks, which transformers refuses, each head is held by several
ranks: the plan's ``colwise`` of ``k_proj`` and ``v_proj`` then cuts by whole heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kvconnect.errors import UnsupportedModel

_WHOLE = frozenset(
    (
        *("embedding_rowwise", "embedding_colwise", "colwise_gather_output", "colwise_rep"),
        *("rowwise_split_input", "rowwise_rep", "replicated_with_grad_allreduce", "replicate"),
        "mla_kv_a_proj",
    )
)
"""Styles whose modules every rank may compute whole: the result is the same."""

KEYS_AND_VALUES = frozenset({"k_proj", "v_proj"})
FUSED_KEYS = frozenset({"query_key_value", "kv_b_proj"})
_QUERIES = frozenset({"q_proj", "q_b_proj"})
_ATTENTION = {f"self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")}
_GATED = {
    **_ATTENTION,
    "self_attn.o_proj": "rowwise",
    "feed_forward.gate_proj": "colwise",
    "feed_forward.up_proj": "colwise",
    "feed_forward.down_proj": "rowwise",
}
_LFM = {
    **_ATTENTION,
    "feed_forward.w1": "colwise",
    "feed_forward.w3": "colwise",
    "feed_forward.w2": "rowwise",
}
_WITHOUT_PLAN: Mapping[str, Mapping[str, str]] = {
    "bamba": _GATED,
    "falcon_h1": _GATED,
    "lfm2": {**_LFM, "self_attn.out_proj": "rowwise"},
    "lfm3": {**_LFM, "self_attn.g_proj": "colwise", "self_attn.o_proj": "rowwise"},
}
"""The divided modules of a layer, by model type, of families that transformers has no plan for."""

_MOST_RANKS = 128
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class _Limit:
    """A quantity that ranks have to share evenly.

    Attributes:
        count: the quantity of the whole model, such as its KV heads.
        unit: the name of the quantity.
        repeats: true if each piece may be on several ranks, equally many for all pieces.
    """

    count: int
    unit: str
    repeats: bool = False

    def allows(self, size: int) -> bool:
        return self.count % size == 0 or (self.repeats and size % self.count == 0)


def tp_plan(model: Any) -> Mapping[str, str]:
    """Returns the style of each divided module and parameter of `model`, by name.

    Layer numbers are ``*``. The plan is that of transformers, if there is one. Empty: there is no
    plan. Recurrent mixers are in no plan: `MixerDivision` divides them.
    """
    config = model.config.get_text_config()
    if config.base_model_tp_plan is not None:
        plan: Mapping[str, str] = model.tp_plan
        return plan
    own = _WITHOUT_PLAN.get(config.model_type, {})
    return {f"{model.base_model_prefix}.layers.*.{name}": style for name, style in own.items()}


def divided_parts(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    """Yields name, style and object of every divided module and parameter of `model`.

    Args:
        model: the whole model.
        plan: style of each module or parameter, by name, layer numbers as ``*``.

    Raises:
        UnsupportedModel: the plan divides nothing.
    """
    if not any(style in {"colwise", "packed_colwise"} for style in plan.values()):
        raise UnsupportedModel(
            f"tensor_parallel_size: {type(model).__name__} has no tensor-parallel plan in "
            "transformers (base_model_tp_plan); use 1"
        )
    for name, part in [*model.named_modules(), *model.named_parameters()]:
        style = plan.get(_NUMBER.sub(".*.", name))
        if style is not None and style not in _WHOLE:
            yield name, style, part


def check_size(model: nn.Module, plan: Mapping[str, str], size: int, *, num_heads: int) -> None:
    """Checks that `size` ranks can share `model`, without reading its weights.

    Args:
        model: the whole model, on any device, also ``meta``.
        plan: the plan of `divided_parts`.
        size: the number of ranks.
        num_heads: query heads of each layer.

    Raises:
        UnsupportedModel: the ranks cannot share it; gives the reason and the possible sizes.
    """
    modules = dict(model.named_modules())
    limits: dict[_Limit, str] = {}
    for name, style, part in divided_parts(model, plan):
        for limit in _limits(name, style, part, modules, num_heads):
            limits.setdefault(limit, name)
    for limit, name in limits.items():
        if not limit.allows(size):
            able = [n for n in range(1, _MOST_RANKS + 1) if all(one.allows(n) for one in limits)]
            more = ", …" if len(able) > _SHOWN else ""
            raise UnsupportedModel(
                f"tensor_parallel_size: {size} ranks cannot share {limit.count} {limit.unit} "
                f"({name}); sizes that work: {', '.join(map(str, able[:_SHOWN]))}{more}"
            )


def _limits(
    name: str, style: str, part: Any, modules: Mapping[str, Any], num_heads: int
) -> Iterator[_Limit]:
    parent, _, last = name.rpartition(".")
    if style == "moe_tp_experts":
        return
    if isinstance(part, nn.Parameter):
        yield from _expert_limits(name, style, part)
    elif not _is_plain_linear(part):
        raise UnsupportedModel(
            f"tensor_parallel_size: {name} is a {type(part).__name__}; only plain linear layers "
            "are divided"
        )
    elif style == "rowwise":
        yield _Limit(part.in_features, "inputs")
    elif style != "colwise":
        raise unknown_style(style, name)
    elif last in KEYS_AND_VALUES:
        heads = part.out_features // int(modules[parent].head_dim)
        yield _Limit(heads, "KV heads", repeats=True)
    elif last in _QUERIES | FUSED_KEYS:
        yield _Limit(num_heads, "attention heads")
    else:
        yield _Limit(part.out_features, "outputs")


def _expert_limits(name: str, style: str, parameter: Any) -> Iterator[_Limit]:
    if parameter.ndim != 3:
        raise UnsupportedModel(
            f"tensor_parallel_size: {name} has {parameter.ndim} dimensions; only the weights of "
            "experts, with 3, are divided as parameters"
        )
    if style == "packed_colwise":
        yield _Limit(parameter.shape[1] // 2, "outputs of experts")
    elif style == "colwise":
        yield _Limit(parameter.shape[1], "outputs of experts")
    elif style == "rowwise":
        yield _Limit(parameter.shape[2], "inputs of experts")
    else:
        raise unknown_style(style, name)


def _is_plain_linear(module: object) -> bool:
    return type(module) is nn.Linear  # not quantised, no adapter around it


def unknown_style(style: str, name: str) -> UnsupportedModel:
    """Returns the error of a `style` that is not served."""
    return UnsupportedModel(
        f"tensor_parallel_size: {name} is divided by the style '{style}', which is not served"
    )


_NUMBER = re.compile(r"\.(\d+)\.")


class ModelRanks(Protocol):
    """The ranks that compute a model together."""

    @property
    def rank(self) -> int:
        """The number of this rank; 0 is the leader."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over all ranks; collective, blocks until all came."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """The part of a dimension that this rank keeps: part `index` of `parts` equal ones."""

    index: int
    parts: int

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """Returns a copy of the part."""
        return tensor.chunk(self.parts, dim)[self.index].clone(
            memory_format=torch.contiguous_format
        )


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """The division of a model among ranks.

    Attributes:
        heads: KV heads of the whole model by the number of a layer, for those layers of which this
            rank holds a part of the heads.
        parts: the divided modules and parameters by name.
    """

    heads: Mapping[int, int] = field(default_factory=dict)
    parts: Mapping[str, object] = field(default_factory=dict)

    def check_whole(self, mixers: Iterable[nn.Module]) -> None:
        """Checks that the plan divides no part of `mixers`, which `MixerDivision` divides.

        Raises:
            UnsupportedModel: a part of a mixer is divided.
        """
        inside = {id(one) for mixer in mixers for one in (*mixer.modules(), *mixer.parameters())}
        for name, part in self.parts.items():
            if id(part) in inside:
                raise UnsupportedModel(
                    f"tensor_parallel_size: the plan divides {name}, a part of a recurrent layer, "
                    "which the plan has to leave whole; use 1"
                )


def shard(
    model: nn.Module, plan: Mapping[str, str], ranks: ModelRanks, *, num_heads: int
) -> Division:
    """Leaves in `model` this rank's part; its modules exchange sums with the others'.

    Weights are cut in place, and copied; the rest is freed.

    Args:
        model: whole, on the CPU; changed.
        plan: style of each module or parameter, by name, layer numbers as ``*``.
        ranks: all of them call this with the same model.
        num_heads: query heads of each layer.

    Raises:
        UnsupportedModel: the plan is empty or has an unknown style, or a dimension cannot be shared
            by so many ranks; names the sizes that work. Nothing changed.
    """
    check_size(model, plan, ranks.size, num_heads=num_heads)
    heads: dict[int, int] = {}
    modules = dict(model.named_modules())
    parts = list(divided_parts(model, plan))
    for name, style, _ in parts:
        if name in modules:
            whole = _shard_module(name, modules, style, ranks)
            if whole or name.endswith(tuple(FUSED_KEYS)):
                heads[_layer(name)] = whole or num_heads
        else:
            _shard_parameter(name, modules, style, ranks)
    return Division(heads, {name: part for name, _, part in parts})


def _shard_module(name: str, modules: Mapping[str, Any], style: str, ranks: ModelRanks) -> int:
    """Returns how many KV heads there are in all, if these are cut; else 0."""
    module = modules[name]
    if style == "moe_tp_experts":
        module.forward = _Summed(module.forward, ranks)
        return 0
    if style == "rowwise":
        cut = _Cut(ranks.rank, ranks.size)
        module.weight.data = cut.of(module.weight.data, 1)
        module.in_features = module.weight.shape[1]
        sum_outputs(module, ranks)
        return 0
    parent, _, last = name.rpartition(".")
    cut, whole = _Cut(ranks.rank, ranks.size), 0
    if last in KEYS_AND_VALUES:
        whole = module.out_features // int(modules[parent].head_dim)
        cut = _head_cut(whole, ranks)
    module.weight.data = cut.of(module.weight.data, 0)
    if module.bias is not None:
        module.bias.data = cut.of(module.bias.data, 0)
    module.out_features = module.weight.shape[0]
    return whole


def sum_outputs(module: Any, ranks: ModelRanks) -> None:
    """Makes a linear layer, whose inputs are divided, return the sum of all ranks' outputs."""
    module.forward = _Rowwise(module, ranks)


def _shard_parameter(name: str, modules: Mapping[str, Any], style: str, ranks: ModelRanks) -> None:
    # Weights of all experts in one tensor, [experts, outputs, inputs]; what they compute is added
    # up behind all of them (moe_tp_experts).
    owner, _, last = name.rpartition(".")
    parameter = getattr(modules[owner], last)
    cut = _Cut(ranks.rank, ranks.size)
    if style == "packed_colwise":
        halves = parameter.data.chunk(2, 1)
        parameter.data = torch.cat([cut.of(half, 1) for half in halves], 1)
    else:
        parameter.data = cut.of(parameter.data, 1 if style == "colwise" else 2)


def _head_cut(heads: int, ranks: ModelRanks) -> _Cut:
    if heads % ranks.size == 0:
        return _Cut(ranks.rank, ranks.size)
    return _Cut(ranks.rank * heads // ranks.size, heads)


def _layer(name: str) -> int:
    found = _NUMBER.search(name)
    if found is None:
        raise UnsupportedModel(f"tensor_parallel_size: {name} is in no numbered layer")
    return int(found[1])


class _Rowwise:
    """Replaces a linear layer's ``forward``: its inputs are divided, its outputs summed."""

    def __init__(self, module: Any, ranks: ModelRanks) -> None:
        self._module, self._ranks = module, ranks

    def __call__(self, states: Tensor) -> Tensor:
        out = linear(states, self._module.weight)
        self._ranks.all_reduce(out)
        return out if self._module.bias is None else out + self._module.bias


class _Summed:
    """Replaces a module's ``forward``: the results of the ranks are summed."""

    def __init__(self, forward: Any, ranks: ModelRanks) -> None:
        self._forward, self._ranks = forward, ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self._forward(*args, **kwargs)
        self._ranks.all_reduce(out)
        return out
