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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kvconnect.engine.model.rank_sizes import (
    FUSED_KEYS,
    KEYS_AND_VALUES,
    check_size,
    divided_parts,
)
from kvconnect.errors import UnsupportedModel

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
