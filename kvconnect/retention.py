"""The settings of how long a request's blocks are kept on the device."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from datetime import timedelta
from itertools import pairwise
from typing import Annotated, ClassVar, Self, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from kvconnect.backend import DEFAULT_RETENTION_PRIORITY
from kvconnect.settings import Settings

Priority = Annotated[int, Field(ge=0, le=100, strict=True)]
"""The retention priority of a block, 0 (evicted first) to 100."""


def _milliseconds(value: object) -> object:
    return value / timedelta(milliseconds=1) if isinstance(value, timedelta) else value


DurationMs = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_milliseconds)]
"""Milliseconds, given as a number or as a ``timedelta``."""


def warn_of(settings: Settings, *names: str) -> None:
    """Warns of fields that are set and have no effect, at the line that made `settings`."""
    for name in names:
        if getattr(settings, name):
            warnings.warn(
                f"{type(settings).__name__}.{name} is deprecated and has no effect",
                FutureWarning,
                stacklevel=5,
            )


class TokenRangeRetentionConfig(Settings):
    """The priority of prompt blocks whose first token lies in ``[token_start, token_end)``.

    Attributes:
        token_start: first token of the range.
        token_end: end of the range, exclusive; ``None``: the end of the prompt (last range only).
        priority: 0 (evicted first) to 100 (kept longest).
        duration_ms: how long it lasts, from when the block was first released; ``None``: for ever.
            Milliseconds, or a ``timedelta``.
    """

    positional: ClassVar[tuple[str, ...]] = (
        *("token_start", "token_end", "priority", "duration_ms"),
    )

    token_start: Annotated[int, Field(ge=0)]
    token_end: int | None = None
    priority: Priority = DEFAULT_RETENTION_PRIORITY
    duration_ms: DurationMs | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.token_end is not None and self.token_end <= self.token_start:
            raise ValueError(
                f"token_end={self.token_end} must be greater than token_start={self.token_start}"
            )
        return self


_TokenRange: TypeAlias = TokenRangeRetentionConfig  # its name means the attribute in there


class KvCacheRetentionConfig(Settings):
    """The retention of a request's blocks: their priority, and for how long.

    Attributes:
        token_range_retention_configs: prompt ranges, in any order; they may touch, not overlap.
        decode_retention_priority: priority of blocks whose first token was generated; may also be
            given, and read, as `decode_retention_policy`.
        decode_duration_ms: how long that lasts; ``None``: for ever. Milliseconds, or a
            ``timedelta``.
        transfer_mode, directory: accepted for compatibility, without effect.
    """

    TokenRangeRetentionConfig: ClassVar[type[_TokenRange]] = _TokenRange
    positional: ClassVar[tuple[str, ...]] = (
        *("token_range_retention_configs", "decode_retention_priority", "decode_duration_ms"),
        *("transfer_mode", "directory"),
    )
    aliases: ClassVar[Mapping[str, str]] = {"decode_retention_policy": "decode_retention_priority"}

    token_range_retention_configs: tuple[_TokenRange, ...] = ()
    decode_retention_priority: Priority = DEFAULT_RETENTION_PRIORITY
    decode_duration_ms: DurationMs | None = None
    transfer_mode: int | str | None = None
    directory: str | None = None

    @property
    def decode_retention_policy(self) -> int:
        """The `decode_retention_priority`, by the name of TensorRT-LLM's documentation."""
        return self.decode_retention_priority

    @model_validator(mode="after")
    def _without_effect(self) -> Self:
        warn_of(self, "transfer_mode", "directory")
        return self

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        ranges = sorted(self.token_range_retention_configs, key=lambda r: r.token_start)
        for left, right in pairwise(ranges):
            if left.token_end is None or left.token_end > right.token_start:
                end = "None" if left.token_end is None else left.token_end
                raise ValueError(
                    f"token_range_retention_configs: [{left.token_start}, {end}) overlaps "
                    f"[{right.token_start}, {right.token_end}); an open end is for the last range"
                )
        return self
