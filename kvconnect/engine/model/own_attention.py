"""Serves models that compute attention themselves: over what their cache returns.

They have no attention interface, but add the keys and values of their tokens to a cache of
transformers', which returns those of the whole sequence. Such a cache has one length for all rows
of a batch, so the model is called once for each sequence of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from kvconnect.engine.model.seam import LayerShape
from kvconnect.errors import UnsupportedModel

__all__ = ["OWN_ATTENTION", "KeysAndValues", "num_layers", "paged_cache", "stored_layers"]

OWN_ATTENTION = frozenset(
    {
        *(
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "bloom",
            "codegen",
            "diffllama",
            "doge",
        ),
        *("falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "hrm_text", "llama4_text", "marian"),
        *("mbart", "megatron-bert", "mvp", "pegasus", "plbart", "rembert", "roformer"),
    }
)
"""The families that are served so. Each was compared with `generate()`."""


class KeysAndValues(Protocol):
    """The keys and values of one sequence."""

    def append(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds those of the next tokens; returns those of all tokens, ``[1, heads, n, dim]``."""


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


def paged_cache(stored: KeysAndValues, num_layers: int, num_tokens: int) -> Cache:
    """Returns the cache that a model is called with for the tokens of one sequence.

    Args:
        stored: stores the keys and values.
        num_layers: the attention layers of the model.
        num_tokens: the tokens of the sequence that are stored before.
    """
    return Cache(layers=[_Layer(number, stored, num_tokens) for number in range(num_layers)])


def num_layers(config: PreTrainedConfig) -> int:
    """Returns the number of the decoder's layers."""
    return int(getattr(config, "decoder_layers", None) or config.num_hidden_layers)


def stored_layers(call: Callable[..., object], count: int, name: str) -> list[LayerShape]:
    """Returns the shape of what each layer stores of a token.

    Args:
        call: calls the model; `paged_cache` makes its argument ``past_key_values``.
        count: the layers of the model.
        name: the name of the model.

    Raises:
        UnsupportedModel: a layer does not store its keys and values exactly once, in order.
    """
    probe = _Probe()
    call(past_key_values=paged_cache(probe, count, 0))
    if probe.numbers != list(range(count)):
        raise UnsupportedModel(
            f"{name} stores the keys of its {count} layers in the order {probe.numbers}: each "
            "must be stored exactly once, in order"
        )
    return probe.layers


class _Probe:
    """Stores nothing: records the layers' shapes and numbers."""

    def __init__(self) -> None:
        self.layers: list[LayerShape] = []
        self.numbers: list[int] = []

    def append(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.numbers.append(layer_idx)
        self.layers.append(LayerShape(key.shape[1], key.shape[3], value.shape[3], None))
        return key, value
