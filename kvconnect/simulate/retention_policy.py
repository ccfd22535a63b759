"""The retention that each request of a trace asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from kvconnect.backends.url import parse_duration
from kvconnect.config import KvCacheRetentionConfig, TokenRangeRetentionConfig
from kvconnect.errors import ConfigurationError

# "output" and "0-2048" are how earlier versions had it.
_RULE = re.compile(r"(system|prompt|decode|output|(\d+)[:-](\d*))=(\d+)(?::(.+))?")
_MOST_CACHED = 4096


class _Rule(NamedTuple):
    part: str
    start: int
    end: int | None
    priority: int
    duration_ms: float | None

    @classmethod
    def parse(cls, text: str) -> Self:
        match = _RULE.fullmatch(text.strip())
        if match is None:
            raise ConfigurationError(
                f"--retention {text}: PART=PRIORITY or PART=PRIORITY:DURATION is needed, where "
                "PART is system, prompt, decode or tokens such as 0:2048 (for example "
                "system=90:600s)"
            )
        part, start, end, priority, duration = match.groups()
        seconds = (
            None if duration is None else parse_duration(duration, field=f"--retention {text}")
        )
        return cls(
            "tokens" if start else part.replace("output", "decode"),
            int(start or 0),
            int(end) if end else None,
            int(priority),
            None if seconds is None else seconds * 1000,
        )


class RetentionPolicy:
    """Makes each request's `KvCacheRetentionConfig`; without rules it makes none.

    Rules are ``PART=PRIORITY[:DURATION]``. PART is ``system`` (the first `system_length` tokens),
    ``prompt`` (the rest of the prompt), ``decode`` (what is generated) or prompt tokens such as
    ``0:2048`` and ``2048:``.

    Raises:
        ConfigurationError: a rule is malformed, out of range, or overlaps another one.
    """

    def __init__(self, rules: Sequence[str] = ()) -> None:
        self._rules = [_Rule.parse(rule) for rule in rules]
        self._needs_system = any(rule.part == "system" for rule in self._rules)
        self._made: dict[int, KvCacheRetentionConfig] = {}
        self._fixed: KvCacheRetentionConfig | None = None
        parts = [rule.part for rule in self._rules if rule.part != "tokens"]
        for part in parts:
            if parts.count(part) > 1:
                raise ConfigurationError(f"--retention: {part} is given twice")
        if self._rules:
            self._make(1)  # finds errors that concern every prompt before the first one

    @classmethod
    def from_file(cls, path: str) -> Self:
        """Makes a policy of the same `KvCacheRetentionConfig`, a JSON object, for every request.

        Raises:
            ConfigurationError: it cannot be read, or is none.
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"--retention-file {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigurationError(f"--retention-file {path}: is no JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigurationError(
                f"--retention-file {path}: must be an object with the fields of "
                f"KvCacheRetentionConfig: {', '.join(KvCacheRetentionConfig.model_fields)}"
            )
        policy = cls()
        policy._fixed = KvCacheRetentionConfig(**fields)
        return policy

    def config(self, system_length: int | None, line: int) -> KvCacheRetentionConfig | None:
        """Returns the retention of a request whose system prompt has so many tokens.

        `line` is its line in the trace.

        Raises:
            ConfigurationError: a rule concerns the system prompt and its length is not known, or
                rules overlap with this one.
        """
        if not self._rules:
            return self._fixed
        if system_length is None:
            if self._needs_system:
                raise ConfigurationError(
                    f"--retention system: line {line} of the trace has no system_length; name the "
                    "tokens instead, as in 0:2048=90:600s"
                )
            system_length = 0
        made = self._made.get(system_length)
        if made is None:
            if len(self._made) >= _MOST_CACHED:
                self._made.clear()
            made = self._made[system_length] = self._make(system_length)
        return made

    def _make(self, system_length: int) -> KvCacheRetentionConfig:
        ranges: list[TokenRangeRetentionConfig] = []
        decode: dict[str, Any] = {}
        for rule in self._rules:
            if rule.part == "decode":
                decode = {
                    "decode_retention_priority": rule.priority,
                    "decode_duration_ms": rule.duration_ms,
                }
                continue
            start, end = rule.start, rule.end
            if rule.part == "system":
                start, end = 0, system_length
            elif rule.part == "prompt":
                start, end = system_length, None
            if end == 0:
                continue
            ranges.append(
                TokenRangeRetentionConfig(
                    token_start=start,
                    token_end=end,
                    priority=rule.priority,
                    duration_ms=rule.duration_ms,
                )
            )
        return KvCacheRetentionConfig(token_range_retention_configs=tuple(ranges), **decode)
