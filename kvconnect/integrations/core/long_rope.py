"""RoPE of kind ``longrope``: which models have other factors for long sequences, and from where."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["config_of_directory", "original_length", "rope_kinds"]

_KINDS = ("longrope", "su")
_PLACES = ("rope_parameters", "rope_scaling")
_ORIGINAL = "original_max_position_embeddings"


def original_length(config: Mapping[str, Any]) -> int | None:
    """Tokens up to which a model's tokens are turned by its short factors.

    With longer sequences engines turn by the long ones, also tokens that are before that place: so
    a block's KV depends on what its tokens do not tell.

    Args:
        config: of the model, as its ``config.json`` has it, with those of its parts.

    Returns:
        ``None`` if there are no long factors; 0 if it is not said up to where.
    """
    lengths = list(_lengths(config, config))
    return min(lengths, default=None)


def rope_kinds(config: Mapping[str, Any]) -> set[str]:
    """Returns the kinds of RoPE of a model and of its parts: ``rope_type`` of its configuration."""
    return {str(rope.get("rope_type", rope.get("type"))) for rope, _ in _ropes(config)}


def config_of_directory(directory: Path) -> dict[str, Any]:
    """The ``config.json`` of a model's directory; empty if there is none that can be read."""
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lengths(part: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[int]:
    """The original lengths of every ``longrope`` in `part` of `config`, however deep."""
    for rope, around in _ropes(part):
        if rope.get("rope_type", rope.get("type")) in _KINDS:
            known = (one.get(_ORIGINAL) for one in (rope, around, config))
            yield next((one for one in known if isinstance(one, int)), 0)


def _ropes(part: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each set of RoPE parameters in `part`, however deep, and the part that has it."""
    for name, value in part.items():
        if not isinstance(value, Mapping):
            continue
        # One set of parameters, or several by the kind of layer.
        for rope in (value, *value.values()) if name in _PLACES else ():
            if isinstance(rope, Mapping):
                yield rope, part
        if name not in _PLACES:
            yield from _ropes(value)
