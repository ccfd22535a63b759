"""Checks the arguments of `LLM.generate`: one prompt or several, settings for all or each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar, cast

from kvconnect.errors import ConfigurationError, nearest
from kvconnect.text import shown
from kvconnect.tokens import Tokens

Prompt: TypeAlias = str | Tokens | Mapping[str, str | Tokens]
"""Text or token ids, or a dict that names which: ``prompt`` or ``prompt_token_ids``."""

_FORMS = ("prompt", "prompt_token_ids")

_Setting = TypeVar("_Setting")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns `prompts` as a list, also if it is a single one.

    Raises:
        ConfigurationError: it is neither text, nor a dict, nor a sequence.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    ndim = getattr(prompts, "ndim", None)  # arrays and tensors have it
    if ndim is None and (isinstance(prompts, (bytes, bytearray)) or not _is_sequence(prompts)):
        raise ConfigurationError(
            f"prompts: {shown(prompts)} is a {type(prompts).__name__}; "
            "give text, token ids, or a list of these"
        )
    if ndim in (0, 1) or (ndim is None and len(prompts) > 0 and _is_number(prompts[0])):
        return [cast("Tokens", prompts)]  # a single prompt of token ids
    return list(cast("Sequence[Prompt]", prompts))


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence)


def _is_number(value: object) -> bool:
    return getattr(value, "ndim", None) == 0 or not hasattr(value, "__len__")


def as_text_or_tokens(prompt: Prompt) -> str | Tokens:
    """Returns `prompt` without the dict around it.

    Raises:
        ConfigurationError: the dict has another key, not exactly one, or a value of another kind.
    """
    if not isinstance(prompt, Mapping):
        return prompt
    for key in prompt:
        if key not in _FORMS:
            raise ConfigurationError(
                f"prompt: unknown key {shown(key)}; {nearest(str(key), _FORMS)}"
            )
    if len(prompt) != 1:
        given = "both" if prompt else "neither"
        raise ConfigurationError(
            f"prompt: a dict has either 'prompt' or 'prompt_token_ids'; this has {given}"
        )
    ((key, value),) = prompt.items()
    if (key == "prompt") != isinstance(value, str):
        wanted = "a string" if key == "prompt" else "a sequence of integers"
        raise ConfigurationError(f"prompt: '{key}' is {wanted}, this is {type(value).__name__}")
    return value


def one_each(field: str, given: _Setting | Sequence[_Setting], count: int) -> list[_Setting]:
    """Returns `given` for each of `count` prompts: a list or tuple has one for each, else for all.

    Raises:
        ConfigurationError: as many were not given; names `field`.
    """
    if not isinstance(given, (list, tuple)):
        return [cast("_Setting", given)] * count
    if len(given) != count:
        raise ConfigurationError(
            f"{field}: {len(given)} were given for {count} prompts; give one, or one each"
        )
    return list(given)
