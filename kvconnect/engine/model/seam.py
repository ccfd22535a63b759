"""The seam between transformers' models and the paged KV cache: one attention function.

Models pass it the ``kv=`` that they are called with; of models that do not, it takes `running`. No
mask function is registered under its name, so transformers builds no masks; the step knows what
each token may see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from kvconnect.engine.model.mixers import ModelCache
from kvconnect.engine.model.scores import AttentionInput
from kvconnect.errors import UnsupportedModel

ATTENTION = "kvconnect"
"""The ``attn_implementation`` that models are loaded with."""

# The arguments of models that do not change the result of attention.
_HARMLESS = frozenset({"dropout", "position_ids", "is_causal", "position_embeddings", "use_cache"})
_SERVED = frozenset({"softcap", "s_aux", "indices"})


class Unmasked:
    """The mask of models whose layers choose tokens by an index; the step knows the true one.

    Some of these models pass the chosen tokens to their attention, others narrow the mask by them.

    Args:
        ndim: its dimensions, as far as the model knows.
        chosen: the tokens that it is narrowed to; see `AttentionInput.chosen`.
    """

    dtype = torch.bool

    def __init__(self, ndim: int = 4, chosen: Tensor | None = None) -> None:
        self.ndim = ndim
        self.chosen = chosen

    def __getitem__(self, at: tuple[int | slice, ...]) -> Unmasked:
        return Unmasked(self.ndim - sum(isinstance(one, int) for one in at))

    def __and__(self, chosen: Tensor) -> Unmasked:
        return Unmasked(self.ndim, chosen)


class IndexCall(Protocol):
    """A call of an indexer for all tokens of the packed row; see `indexers`.

    Attributes:
        layer_idx: the model's number of the layer.
        num_heads: the scores of each pair of tokens that are held at once.
        num_tokens: the tokens of the packed row.
        batched: true if it takes sequences of several lengths at once.
    """

    layer_idx: int
    num_heads: int
    num_tokens: int
    batched: bool

    def chosen(self, rows: Tensor, seen: Tensor, append: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the tokens that some tokens attend to, equally many ones of each sequence.

        Args:
            rows: their rows of the packed row, ``[sequences, tokens]`` int64.
            seen: the positions that each may choose, ``[sequences, tokens, keys]`` bool.
            append: stores their index keys, ``[sequences, tokens, dim]``, and returns those of
                the whole sequences, ``[sequences, keys, dim]``.

        Returns:
            Positions, ``[sequences * tokens, most]``; see `AttentionInput.chosen`. Those that are
            not seen count as none.
        """


class KvStep(Protocol):
    """The ``kv=`` that models are called with.

    Attributes:
        last_tokens: ``[rows]`` int64, the tokens whose logits are computed; the last layer attends
            only from these.
    """

    last_tokens: Tensor

    def attend(self, layer_idx: int, given: AttentionInput) -> Tensor:
        """Computes the attention of one layer; see `ForwardStep.attend`."""


class IndexedStep(KvStep, Protocol):
    """A step of a model whose layers may choose tokens by an index."""

    def choose(self, call: IndexCall) -> Tensor:
        """Chooses the tokens that one layer attends to; see `ForwardStep.choose`."""


running: ContextVar[IndexedStep] = ContextVar("kvconnect_step")
"""The step that the model of this thread computes. Some models pass their attention no ``kv=``."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Unmasked | None,
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
    chosen = extra.get("indices")
    if isinstance(attention_mask, Unmasked) and attention_mask.chosen is not None:
        chosen = attention_mask.chosen
    if softcap or sinks is not None or latents is not None or chosen is not None:
        given = replace(
            given,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,  # before it changes
            softcap=softcap or None,
            sinks=sinks,
            latents=latents,
            chosen=chosen,
        )
    return kv.attend(layer_idx, given), None


AttentionInterface.register(ATTENTION, _attention)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of what one layer stores per token, and its window.

    The keys of an index, by which a layer chooses the tokens that it attends to, are stored like
    latents: as a layer of their own, before that layer.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    is_index: bool = False

    @property
    def is_latent(self) -> bool:
        """Returns whether it stores one head without values, which every rank has whole."""
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

    def __init__(self, cache: ModelCache | None = None) -> None:
        self._cache = cache
        self.layers: list[LayerShape] = []
        self.numbers: list[int] = []
        self.last_tokens = torch.zeros(1, dtype=torch.int64)

    def attend(self, layer_idx: int, given: AttentionInput) -> Tensor:
        """Records the layer; its output is zero."""
        pairs = zip(self.numbers, self.layers, strict=True)
        done = [number for number, layer in pairs if not layer.is_index]
        if self._cache is not None:
            layer_idx = self._cache.layer_idx
            in_order = layer_idx > max(done, default=-1)
        else:
            in_order = layer_idx == len(done)
        if not in_order:
            again = layer_idx < len(done)
            raise UnsupportedModel(
                f"attention layer {layer_idx} ran when layer {len(done)} was expected: "
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

    def choose(self, call: IndexCall) -> Tensor:
        """Records the keys of an index; the tokens are those of one sequence."""

        def append(keys: Tensor) -> Tensor:
            self.numbers.append(call.layer_idx)
            self.layers.append(LayerShape(1, keys.shape[2], 0, None, is_index=True))
            return keys

        rows = torch.arange(call.num_tokens)
        return call.chosen(rows[None], rows <= rows[None, :, None], append)

    def check(
        self, module: nn.Module, mask: Tensor | Unmasked | None, extra: Mapping[str, Any]
    ) -> None:
        """Refuses changes of the scores that the paged attention does not support.

        Raises:
            UnsupportedModel: a mask of the model's own, bidirectional attention, …
        """
        given = {name: value for name, value in extra.items() if value is not None}
        if mask is not None and not isinstance(mask, Unmasked):
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
