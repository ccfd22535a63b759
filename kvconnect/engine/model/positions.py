"""Limits the length of sequences by what positions the model knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from kvconnect.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class PositionLimit:
    """The longest sequence, and the reason for the limit."""

    num_tokens: int
    reason: str


def _rope_parameters(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    yield from nested or [parameters]


def position_limit(config: PreTrainedConfig) -> PositionLimit | None:
    """Returns the limit of a sequence's length; ``None``: no limit is known.

    Raises:
        UnsupportedModel: its RoPE changes with the length of a sequence, at an unknown length; or
            its positions depend on the tokens of a chunk.
    """
    if getattr(config, "use_learned_position_embeddings", True) is False:
        raise UnsupportedModel(
            "use_learned_position_embeddings=False is not served: positions leave out padding, but "
            "not that of earlier chunks"
        )
    longest = getattr(config, "max_position_embeddings", None)
    limits = [
        PositionLimit(known, f"the model's {name}")
        for name in ("max_position_embeddings", "max_target_positions")
        if (known := getattr(config, name, None))
    ]
    if config.model_type == "big_bird" and config.attention_type == "block_sparse":
        kept = (5 + 2 * config.num_random_blocks) * config.block_size
        limits.append(PositionLimit(kept, "the model's full attention, beyond which it is sparse"))
    if kept := getattr(config, "keep_window_size", None):
        reason = "the model's keep_window_size, beyond which tokens with equal values are ambiguous"
        limits.append(PositionLimit(kept, reason))
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type")
        if kind in {"longrope", "dynamic"}:
            # Their frequencies change with the longest sequence of a batch: cached keys turn wrong.
            original = rope.get("original_max_position_embeddings") or longest
            if original is None:
                raise UnsupportedModel(f"{kind} RoPE without an original length is not served")
            reason = f"the original length of the model's {kind} RoPE, beyond which keys change"
            # At just that length, dynamic frequencies are those of the longest sequence before.
            limits.append(PositionLimit(original - (kind == "dynamic"), reason))
    return min(limits, key=lambda limit: limit.num_tokens, default=None)
