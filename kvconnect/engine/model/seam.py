"""The seam between transformers' models and the paged KV cache: one attention function.

Models pass it the ``kv=`` that they are called with; of models that do not, it takes `running`. No
mask function is registered under its name, so transformers builds no masks; the step knows what
each token may see.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from kvconnect.engine.model.scores import AttentionInput
from kvconnect.errors import UnsupportedModel

__all__ = ["ATTENTION", "AttentionProbe", "KvStep", "LayerCounter", "LayerShape", "running"]

ATTENTION = "kvconnect"
"""The ``attn_implementation`` that models are loaded with."""

# The arguments of models that do not change the result of attention.
_HARMLESS = frozenset({"dropout", "position_ids", "is_causal", "position_embeddings", "use_cache"})
_SERVED = frozenset({"softcap", "s_aux"})


class KvStep(Protocol):
    """The ``kv=`` that models are called with.

    Attributes:
        last_tokens: ``[rows]`` int64, the tokens whose logits are computed; the last layer attends
            only from these.
    """

    last_tokens: Tensor

    def attend(self, layer_idx: int, given: AttentionInput) -> Tensor:
        """Computes the attention of one layer; see `ForwardStep.attend`."""


running: ContextVar[KvStep] = ContextVar("kvconnect_step")
"""The step that the model of this thread computes. Some models pass their attention no ``kv=``."""


class LayerCounter(Protocol):
    """The cache that models with recurrent layers are called with.

    Attributes:
        layer_idx: the model's number of the attention layer that runs now. A module that several
            layers share does not know it.
    """

    layer_idx: int


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv: KvStep | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    layer_idx: Any = module.layer_idx
    kv = running.get() if kv is None else kv
    if isinstance(kv, AttentionProbe):
        kv.check(module, attention_mask, extra)
    given = AttentionInput(query, key, value, scaling, sliding_window)
    softcap, sinks = extra.get("softcap"), extra.get("s_aux")
    latents = vars(module).get("expand_kv")
    if softcap or sinks is not None or latents is not None:
        given = replace(
            given,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,  # before it changes
            softcap=softcap or None,
            sinks=sinks,
            latents=latents,
        )
    return kv.attend(layer_idx, given), None


AttentionInterface.register(ATTENTION, _attention)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of what one layer stores per token, and its window."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None

    @property
    def is_latent(self) -> bool:
        """Returns whether it stores latents, from which every head's keys and values are made."""
        return self.value_dim == 0


class AttentionProbe:
    """A ``kv=`` that stores nothing: it records layers' shapes and refuses what is not served.

    Configurations are not used: MLA, OPT and GPT-2 each have other names for these properties.

    Args:
        cache: the cache argument of a model with recurrent layers; ``None``: all layers attend.

    Attributes:
        layers: the layers' shapes, in the order in which the layers ran.
        numbers: the model's numbers of these layers.
    """

    def __init__(self, cache: LayerCounter | None = None) -> None:
        self._cache = cache
        self.layers: list[LayerShape] = []
        self.numbers: list[int] = []
        self.last_tokens = torch.zeros(1, dtype=torch.int64)

    def attend(self, layer_idx: int, given: AttentionInput) -> Tensor:
        """Records the layer; its output is zero."""
        if self._cache is not None:
            layer_idx = self._cache.layer_idx
            in_order = layer_idx > max(self.numbers, default=-1)
        else:
            in_order = layer_idx == len(self.layers)
        if not in_order:
            again = layer_idx < len(self.layers)
            raise UnsupportedModel(
                f"attention layer {layer_idx} ran when layer {len(self.layers)} was expected: "
                "every layer must attend exactly once, in order, and "
                f"{'this one attends again' if again else 'those between have no attention'}"
            )
        self.numbers.append(layer_idx)
        key, value = given.key.shape, given.value.shape
        self.layers.append(LayerShape(key[1], key[3], value[3], given.window))
        _, heads, tokens, _ = given.query.shape
        if given.sinks is not None and given.sinks.shape != (heads,):
            raise UnsupportedModel(
                f"attention with sinks {tuple(given.sinks.shape)} is not served: one for each of "
                f"the {heads} heads is"
            )
        return given.query.new_zeros(1, tokens, heads, given.value_dim)

    def check(self, module: nn.Module, mask: Tensor | None, extra: Mapping[str, Any]) -> None:
        """Refuses changes of the scores that the paged attention does not support.

        Raises:
            UnsupportedModel: a mask of the model's own, bidirectional attention, …
        """
        given = {name: value for name, value in extra.items() if value is not None}
        if mask is not None:
            raise UnsupportedModel("the model brings an attention mask of its own")
        if given.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise UnsupportedModel("bidirectional attention is not served; causal models only")
        unknown = sorted(
            name
            for name, value in given.items()
            if name not in _HARMLESS | _SERVED and (isinstance(value, Tensor) or value)
        )
        if unknown:
            raise UnsupportedModel(f"attention with {', '.join(unknown)} is not served")
