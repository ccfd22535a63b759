"""The weights and code that a model's configuration takes from another repository."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvconnect.digest.doubts import Doubt
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.core.long_rope import config_of_directory

# Fields of Ultravox: repositories of the parts that its own repository omits.
_WEIGHTS = ("text_model_id", "audio_model_id")


def refuse_elsewhere(config: Mapping[str, Any], directory: Path, *, trusts_code: bool) -> None:
    """Refuses a model of which a part is in a repository that its digest does not cover.

    Args:
        config: as the engine resolved it.
        directory: the directory of the model.
        trusts_code: the engine runs code that the model's files name.

    Raises:
        ConfigurationError: names the field of the configuration.
    """
    for name in _WEIGHTS:
        if (value := config.get(name)) is not None:
            raise ConfigurationError(
                f"{name}={value}: {Doubt.WEIGHTS_FROM_ELSEWHERE.sentence}, which keys are made of; "
                "name them with model_revision"
            )
    if not trusts_code:
        return
    for code in _texts(config_of_directory(directory).get("auto_map")):
        if "--" in code:
            raise ConfigurationError(
                f"auto_map: '{code}' is code of another repository, which keys do not hold; name "
                "weights and code with model_revision"
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
