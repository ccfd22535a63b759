"""A model's weights cut into the parts of tensor-parallel ranks, by transformers' own plan.

The plan (``base_model_tp_plan``) names, for each module, how its weights are divided: ``colwise``
by outputs, ``rowwise`` by inputs with the ranks' results added up. What it says of modules whose
input and output every rank has whole (embeddings, the head, projections that are gathered) is a
matter of memory only: those stay whole here.

Where there are fewer KV heads than ranks, which transformers refuses, each head is held by several
ranks: the plan's ``colwise`` of ``k_proj`` and ``v_proj`` then cuts by whole heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kvconnect.errors import ConfigurationError, UnsupportedModel

__all__ = ["ModelRanks", "SingleRank", "shard"]

_WHOLE = frozenset(
    (
        *("embedding_rowwise", "embedding_colwise", "colwise_gather_output", "colwise_rep"),
        *("rowwise_split_input", "rowwise_rep", "replicated_with_grad_allreduce", "replicate"),
        "mla_kv_a_proj",
    )
)
"""Styles whose modules every rank may compute whole: the result is the same."""

_KEYS_AND_VALUES = frozenset({"k_proj", "v_proj"})
_FUSED_KEYS = frozenset({"query_key_value", "kv_b_proj"})
_QUERIES = frozenset({"q_proj", "q_b_proj"})
_NUMBER = re.compile(r"\.(\d+)\.")


class ModelRanks(Protocol):
    """The ranks that compute a model together."""

    @property
    def rank(self) -> int:
        """This one; 0 is the leader."""

    @property
    def size(self) -> int:
        """How many there are."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Make `tensor` the sum of all ranks'; collective, in place, blocks until all came."""


class SingleRank:
    """The only rank, which has the model whole."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> None:
        """Nothing: `tensor` is the sum."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """What of a dimension this rank keeps: part `index` of `parts` equal ones."""

    index: int
    parts: int

    def of(self, tensor: Tensor, dim: int, name: str) -> Tensor:
        """A copy of the part.

        Raises:
            UnsupportedModel: the dimension has no such parts.
        """
        size = tensor.shape[dim]
        if size % self.parts:
            raise UnsupportedModel(
                f"tensor_parallel_size: {name} has {size} rows or columns, which {self.parts} "
                "ranks cannot share"
            )
        return tensor.chunk(self.parts, dim)[self.index].clone(
            memory_format=torch.contiguous_format
        )


def shard(
    model: nn.Module, plan: Mapping[str, str], ranks: ModelRanks, *, num_heads: int
) -> dict[int, int]:
    """Leave in `model` what this rank computes; its modules exchange sums with the others'.

    Weights are cut where they lie, and copied; what is not needed any more is let go.

    Args:
        model: whole, on the CPU; changed.
        plan: style of each module or parameter, by name, layer numbers as ``*``.
        ranks: all of them call this with the same model.
        num_heads: query heads of each layer.

    Returns:
        KV heads of the whole model by the number of a layer, for those layers of which this rank
        holds a part of the heads.

    Raises:
        UnsupportedModel: the plan is empty or has an unknown style, or a dimension cannot be shared
            by so many ranks. The model is of no use then.
    """
    if not any(style in {"colwise", "packed_colwise"} for style in plan.values()):
        raise UnsupportedModel(
            f"tensor_parallel_size: {type(model).__name__} has no tensor-parallel plan in "
            "transformers (base_model_tp_plan); use 1"
        )
    heads: dict[int, int] = {}
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    for name in [*modules, *parameters]:
        style = plan.get(_generic(name))
        if style is None or style in _WHOLE:
            continue
        if name in modules:
            _check_heads(name, num_heads, ranks)
            whole = _shard_module(name, modules, style, ranks)
            if whole or name.endswith(tuple(_FUSED_KEYS)):
                heads[_layer(name)] = whole or num_heads
        else:
            _shard_parameter(name, modules, style, ranks)
    return heads


def _generic(name: str) -> str:
    return _NUMBER.sub(".*.", name)


def _check_heads(name: str, num_heads: int, ranks: ModelRanks) -> None:
    if name.rpartition(".")[2] in _QUERIES | _FUSED_KEYS and num_heads % ranks.size:
        raise UnsupportedModel(
            f"tensor_parallel_size: {ranks.size} ranks cannot share {num_heads} attention heads; "
            f"use a divisor of {num_heads}"
        )


def _shard_module(name: str, modules: Mapping[str, Any], style: str, ranks: ModelRanks) -> int:
    """Returns how many KV heads there are in all, if these are cut; else 0."""
    module = modules[name]
    if style == "moe_tp_experts":
        module.forward = _Summed(module.forward, ranks)
        return 0
    if not _is_plain_linear(module):
        raise UnsupportedModel(
            f"tensor_parallel_size: {name} is a {type(module).__name__}; only plain linear layers "
            "are divided"
        )
    if style == "rowwise":
        cut = _Cut(ranks.rank, ranks.size)
        module.weight.data = cut.of(module.weight.data, 1, name)
        module.in_features = module.weight.shape[1]
        module.forward = _Rowwise(module, ranks)
        return 0
    if style != "colwise":
        raise _unknown(style, name)
    parent, _, last = name.rpartition(".")
    cut, whole = _Cut(ranks.rank, ranks.size), 0
    if last in _KEYS_AND_VALUES:
        whole = module.out_features // int(modules[parent].head_dim)
        cut = _head_cut(whole, ranks)
    module.weight.data = cut.of(module.weight.data, 0, name)
    if module.bias is not None:
        module.bias.data = cut.of(module.bias.data, 0, name)
    module.out_features = module.weight.shape[0]
    return whole


def _shard_parameter(name: str, modules: Mapping[str, Any], style: str, ranks: ModelRanks) -> None:
    # Weights of all experts in one tensor, [experts, outputs, inputs]; what they compute is added
    # up behind all of them (moe_tp_experts).
    owner, _, last = name.rpartition(".")
    parameter = getattr(modules[owner], last)
    cut = _Cut(ranks.rank, ranks.size)
    if parameter.ndim != 3:
        raise UnsupportedModel(
            f"tensor_parallel_size: {name} has {parameter.ndim} dimensions; only the weights of "
            "experts, with 3, are divided as parameters"
        )
    if style == "packed_colwise":
        halves = parameter.data.chunk(2, 1)
        parameter.data = torch.cat([cut.of(half, 1, name) for half in halves], 1)
    elif style == "rowwise":
        parameter.data = cut.of(parameter.data, 2, name)
    else:
        raise _unknown(style, name)


def _is_plain_linear(module: object) -> bool:
    return type(module) is nn.Linear  # not quantised, no adapter around it


def _head_cut(heads: int, ranks: ModelRanks) -> _Cut:
    if heads % ranks.size == 0:
        return _Cut(ranks.rank, ranks.size)
    if ranks.size % heads:
        raise UnsupportedModel(
            f"tensor_parallel_size: {ranks.size} ranks cannot share {heads} KV heads; use a "
            f"divisor or a multiple of {heads}"
        )
    return _Cut(ranks.rank * heads // ranks.size, heads)


def _layer(name: str) -> int:
    found = _NUMBER.search(name)
    if found is None:
        raise UnsupportedModel(f"tensor_parallel_size: {name} is in no numbered layer")
    return int(found[1])


def _unknown(style: str, name: str) -> ConfigurationError:
    return UnsupportedModel(
        f"tensor_parallel_size: {name} is divided by the style '{style}', which is not served"
    )


class _Rowwise:
    """In place of a linear layer's ``forward``: its inputs are divided, its outputs added up."""

    def __init__(self, module: Any, ranks: ModelRanks) -> None:
        self._module, self._ranks = module, ranks

    def __call__(self, states: Tensor) -> Tensor:
        out = linear(states, self._module.weight)
        self._ranks.all_reduce(out)
        return out if self._module.bias is None else out + self._module.bias


class _Summed:
    """In place of a module's ``forward``: what the ranks compute is added up."""

    def __init__(self, forward: Any, ranks: ModelRanks) -> None:
        self._forward, self._ranks = forward, ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self._forward(*args, **kwargs)
        self._ranks.all_reduce(out)
        return out
