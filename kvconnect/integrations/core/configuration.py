"""The configuration of a model: its kinds of RoPE, and parts in another repository."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvconnect.digest.doubts import Doubt
from kvconnect.errors import ConfigurationError

_KINDS = ("longrope", "su")
_PLACES = ("rope_parameters", "rope_scaling")
_ORIGINAL = "original_max_position_embeddings"


def original_length(config: Mapping[str, Any]) -> int | None:
    """Returns the number of tokens up to which a model uses its short factors.

    For longer sequences engines use the long factors, also for the tokens before that position. So
    a block's KV depends on more than its tokens.

    Args:
        config: the configuration of the model, as its ``config.json`` has it, with those of its
            parts.

    Returns:
        ``None`` if there are no long factors; 0 if the configuration gives no length.
    """
    lengths = list(_lengths(config, config))
    return min(lengths, default=None)


def rope_kinds(config: Mapping[str, Any]) -> set[str]:
    """Returns the kinds of RoPE of a model and of its parts: ``rope_type`` of its configuration."""
    return {str(rope.get("rope_type", rope.get("type"))) for rope, _ in _ropes(config)}


def config_of_directory(directory: Path) -> dict[str, Any]:
    """Returns the ``config.json`` of a model's directory; empty if it cannot be read."""
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lengths(part: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[int]:
    """Yields the original length of every ``longrope`` in `part` of `config`, however deep."""
    for rope, around in _ropes(part):
        if rope.get("rope_type", rope.get("type")) in _KINDS:
            known = (one.get(_ORIGINAL) for one in (rope, around, config))
            yield next((one for one in known if isinstance(one, int)), 0)


def _ropes(part: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yields each set of RoPE parameters in `part`, however deep, and the part that has it."""
    for name, value in part.items():
        if not isinstance(value, Mapping):
            continue
        # One set of parameters, or several by the kind of layer.
        for rope in (value, *value.values()) if name in _PLACES else ():
            if isinstance(rope, Mapping):
                yield rope, part
        if name not in _PLACES:
            yield from _ropes(value)


# Fields of Ultravox: repositories of the parts that its own repository omits.
_WEIGHTS = ("text_model_id", "audio_model_id")


def refuse(reasons: Mapping[str, object]) -> None:
    """Refuses a configuration for the first of `reasons` whose value is true.

    Raises:
        ConfigurationError: with that reason.
    """
    for reason, applies in reasons.items():
        if applies:
            raise ConfigurationError(reason)


def refuse_elsewhere(config: Mapping[str, Any], directory: Path, *, trusts_code: bool) -> None:
    """Refuses a model of which a part is in a repository that its digest does not cover.

    Args:
        config: as the engine resolved it.
        directory: the directory of the model.
        trusts_code: the engine runs code that the model's files name.

    Raises:
        ConfigurationError: names the field of the configuration.
    """
    weights = {name: config.get(name) for name in _WEIGHTS}
    code = _texts(config_of_directory(directory).get("auto_map")) if trusts_code else ()
    refuse(
        {
            f"{name}={value}: {Doubt.WEIGHTS_FROM_ELSEWHERE.sentence}, which keys are made of; "
            "name them with model_revision": value is not None
            for name, value in weights.items()
        }
        | {
            f"auto_map: '{one}' is code of another repository, which keys do not hold; name "
            "weights and code with model_revision": "--" in one
            for one in code
        }
    )


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
