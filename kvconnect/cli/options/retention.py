"""Parses retention on the command line: ``0:1024=90:30s`` and ``decode=50``."""

from __future__ import annotations

from collections.abc import Iterable

from kvconnect.backends.url import parse_duration
from kvconnect.config import KvCacheRetentionConfig, TokenRangeRetentionConfig
from kvconnect.errors import ConfigurationError

__all__ = ["parse_retention"]

_FORM = "write START:END=PRIORITY[:DURATION] or decode=PRIORITY[:DURATION], as in 0:1024=90:30s"


def parse_retention(texts: Iterable[str]) -> KvCacheRetentionConfig | None:
    """Returns the retention of all options `texts` together; ``None`` without any.

    ``START:END`` are prompt tokens; without END, all from START on. ``decode`` stands for generated
    tokens. A duration is 500ms, 30s, 10m, …; without one it is unlimited.

    Raises:
        ConfigurationError: names the text and what is right.
    """
    ranges: list[TokenRangeRetentionConfig] = []
    decode: KvCacheRetentionConfig | None = None
    for text in texts:
        where, _, policy = text.partition("=")
        priority, _, duration = policy.partition(":")
        field = f"--retention {text}"
        duration_ms = 1000 * parse_duration(duration, field=field) if duration else None
        if where == "decode":
            decode = KvCacheRetentionConfig(
                decode_retention_priority=_number(priority, text), decode_duration_ms=duration_ms
            )
            continue
        start, colon, end = where.partition(":")
        if not colon:
            raise ConfigurationError(f"{field}: {_FORM}")
        ranges.append(
            TokenRangeRetentionConfig(
                token_start=_number(start, text),
                token_end=_number(end, text) if end else None,
                priority=_number(priority, text),
                duration_ms=duration_ms,
            )
        )
    if not ranges:
        return decode
    decode = decode or KvCacheRetentionConfig()
    return KvCacheRetentionConfig(
        token_range_retention_configs=tuple(ranges),
        decode_retention_priority=decode.decode_retention_priority,
        decode_duration_ms=decode.decode_duration_ms,
    )


def _number(digits: str, text: str) -> int:
    if not digits.isdecimal():
        raise ConfigurationError(f"--retention {text}: {_FORM}")
    return int(digits)
