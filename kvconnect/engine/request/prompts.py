"""What `LLM.generate` takes: one prompt or several, and settings for all or one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar, cast

from kvconnect.errors import ConfigurationError
from kvconnect.tokens import Tokens

__all__ = ["Prompt", "as_prompts", "one_each"]

Prompt: TypeAlias = str | Tokens
"""Text or token ids."""

_Setting = TypeVar("_Setting")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """`prompts` as a list, also if it is a single one."""
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) > 0 and not hasattr(prompts[0], "__len__"):
        return [cast("Tokens", prompts)]  # a single prompt of token ids
    return list(cast("Sequence[Prompt]", prompts))


def one_each(field: str, given: _Setting | Sequence[_Setting], count: int) -> list[_Setting]:
    """`given` for each of `count` prompts: a list or tuple has one for each, all else is for all.

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
