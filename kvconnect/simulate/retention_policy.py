"""The retention that requests ask for, by rules as users write them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from kvconnect.backends.url import parse_duration
from kvconnect.config import KvCacheRetentionConfig, TokenRangeRetentionConfig
from kvconnect.errors import ConfigurationError

# "output" and "0-2048" are how earlier versions had it.
_RULE = re.compile(r"(system|prompt|decode|output|(\d+)[:-](\d*))=(\d+)(?::(.+))?")
_PARTS = ("system", "prompt", "decode")
_MOST_CACHED = 4096


class _Rule(NamedTuple):
    part: str
    start: int
    end: int | None
    priority: int
    duration_ms: float | None

    @classmethod
    def parse(cls, text: str, parts: Sequence[str]) -> Self:
        match = _RULE.fullmatch(text.strip())
        part = "" if match is None else match[1].replace("output", "decode")
        if match is None or not (match[2] or part in parts):
            raise ConfigurationError(
                f"--retention {text}: PART=PRIORITY or PART=PRIORITY:DURATION is needed, where "
                f"PART is {', '.join(parts)} or tokens such as 0:2048 (for example "
                f"{parts[0]}=90:600s)"
            )
        _, start, end, priority, duration = match.groups()
        duration_ms = None
        if duration is not None:
            duration_ms = 1000 * parse_duration(duration, field=f"--retention {text}")
        end_token = int(end) if end else None
        part = "tokens" if start else part
        return cls(part, int(start or 0), end_token, int(priority), duration_ms)


class RetentionPolicy:
    """Makes each request's `KvCacheRetentionConfig`; without rules it makes none.

    Rules are ``PART=PRIORITY[:DURATION]``. PART is ``system`` (the first `system_length` tokens),
    ``prompt`` (the rest of the prompt), ``decode`` (what is generated) or prompt tokens such as
    ``0:2048`` and ``2048:``.

    Args:
        rules: the rules.
        parts: the names that PART may be, beside prompt tokens.

    Raises:
        ConfigurationError: a rule is malformed, out of range, or overlaps another one.
    """

    def __init__(self, rules: Sequence[str] = (), parts: Sequence[str] = _PARTS) -> None:
        self._rules = [_Rule.parse(rule, parts) for rule in rules]
        self._needs_system = any(rule.part == "system" for rule in self._rules)
        self._made: dict[int, KvCacheRetentionConfig] = {}
        self._fixed: KvCacheRetentionConfig | None = None
        given = Counter(rule.part for rule in self._rules if rule.part != "tokens")
        for part, count in given.items():
            if count > 1:
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
        except (ValueError, RecursionError) as error:
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
            if rule.part == "system" and not system_length:
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
