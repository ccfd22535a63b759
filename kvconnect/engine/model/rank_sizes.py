"""Checks how many ranks can share a model, from the parts of its tensor-parallel plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

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
_NUMBER = re.compile(r"\.\d+\.")
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
