"""Serves models that compute attention themselves: over what their cache returns.

They have no attention interface, but add the keys and values of their tokens to a cache of
transformers', which returns those of the whole sequence. Such a cache has one length for all rows
of a batch, so the model is called once for all single tokens at one position, or at several if
its family is one of `PADDED`, and once for each other sequence of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from kvconnect.engine.model.mixer_probe import PROBED_TOKENS, MixerProbe
from kvconnect.engine.model.mixers import ModelCache, PackedStates
from kvconnect.engine.model.seam import AttentionProbe, LayerShape
from kvconnect.errors import UnsupportedModel

OWN_ATTENTION = frozenset(
    {
        *(
            "bart",
            "big_bird",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "bloom",
            "codegen",
            "diffllama",
            "doge",
        ),
        *("falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "hrm_text", "inkling2_text"),
        *("inkling_text", "llama4_text", "marian"),
        *("mbart", "megatron-bert", "mvp", "pegasus", "plbart", "rembert", "roformer", "trocr"),
        *("whisper", "xglm"),
    }
)
"""The families that are served so. Each was compared with `generate()`."""

PADDED = frozenset({"bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "xglm"})
"""Those of them that compute sequences of several lengths in one call, the shorter ones padded.

No number of theirs depends on where a sequence begins in the row. Each was compared with
`generate()` so.
"""


class KeysAndValues(Protocol):
    """The keys and values of sequences of one length."""

    def append(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds those of the next tokens; returns all, ``[sequences, heads, n, dim]`` each."""


class _Layer(DynamicLayer):
    def __init__(self, number: int, stored: KeysAndValues, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._number = number
        self._stored = stored
        self._num_tokens = num_tokens

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the keys and values, and returns those of the whole sequence."""
        keys, values = self._stored.append(self._number, key_states, value_states)
        self._num_tokens = keys.shape[-2]
        return keys, values

    def get_seq_length(self) -> int:
        """Returns the number of tokens that are stored."""
        return self._num_tokens


class _Paged(ModelCache, Cache):  # type: ignore[misc]
    update = Cache.update  # type: ignore[assignment]


class PagedCache(_Paged):
    """The cache that a model is called with for the tokens of sequences of one length.

    Args:
        stored: stores the keys and values.
        num_layers: the attention layers of the model.
        num_tokens: the tokens of each sequence that are stored before.
        states: the states of the only sequence; ``None``: the model has no recurrent layers.
    """

    def __init__(
        self,
        stored: KeysAndValues,
        num_layers: int,
        num_tokens: int,
        states: PackedStates | None = None,
    ) -> None:
        super().__init__()
        Cache.__init__(self, layers=_layers(stored, num_layers, num_tokens))
        self.states = states


class ProbedCache(MixerProbe, _Paged):  # type: ignore[misc]
    """A cache that stores nothing: records the attention layers, and the mixers with their states.

    Args:
        num_layers: the attention layers of the model.

    Attributes:
        stored: recorded the attention layers.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.stored = _Probe()
        Cache.__init__(self, layers=_layers(self.stored, num_layers, 0))


def _layers(stored: KeysAndValues, num_layers: int, num_tokens: int) -> list[Any]:
    return [_Layer(number, stored, num_tokens) for number in range(num_layers)]


def num_layers(config: PreTrainedConfig) -> int:
    """Returns the number of the decoder's layers."""
    return int(getattr(config, "decoder_layers", None) or config.num_hidden_layers)


def probed(call: Callable[[Tensor, ProbedCache], Tensor], count: int, name: str) -> ProbedCache:
    """Returns a cache that recorded what each layer stores.

    Args:
        call: calls the model with tokens, ``[1, PROBED_TOKENS]`` int64, and a cache; returns all
            logits, ``[1, PROBED_TOKENS, vocab]``.
        count: the layers of the model.
        name: the name of the model.

    Raises:
        UnsupportedModel: a layer does not store its keys and values exactly once, in order; or a
            token attends to later ones, so that its keys depend on these.
    """
    tokens = torch.ones(1, PROBED_TOKENS, dtype=torch.int64)
    others = tokens.index_fill(1, torch.tensor([PROBED_TOKENS - 1]), 0)
    caches = [ProbedCache(count) for _ in range(2)]
    logits = [
        call(one, cache)[0].double() for one, cache in zip((tokens, others), caches, strict=True)
    ]
    probe = caches[0].stored
    if probe.numbers != list(range(count)):
        raise UnsupportedModel(
            f"{name} stores the keys of its {count} layers in the order {probe.numbers}: each "
            "must be stored exactly once, in order"
        )
    change = (logits[0] - logits[1]).square().sum(dim=-1)
    if change[0] > 1e-4 * change[-1]:  # experts round in another way beside other tokens
        raise UnsupportedModel(
            f"{name} attends to later tokens: bidirectional attention is not served; causal models "
            "only"
        )
    return caches[0]


class _Probe(AttentionProbe):
    def append(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Records the layer."""
        self.numbers.append(layer_idx)
        self.layers.append(LayerShape(key.shape[1], key.shape[3], value.shape[3], None))
        return key, value
