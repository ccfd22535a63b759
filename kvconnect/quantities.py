"""Reads and writes sizes and durations, such as ``200GiB`` and ``7d``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvconnect.errors import ConfigurationError
from kvconnect.redaction import text_without_passwords

_BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_SIZE_UNITS = {
    "b": 1,
    **_BINARY,
    **{f"{letter}ib": factor for letter, factor in _BINARY.items() if letter},
    **{f"{letter}b": 1000 ** (index + 1) for index, letter in enumerate("kmgtp")},
}
_TIME_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_TOO_LARGE = float(1 << 63)
LONGEST_S = 36500 * 86400.0
"""The longest duration."""
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_size(text: str, *, field: str = "size") -> int:
    """Returns the bytes of ``200GiB``, ``1.5TB``, ``64M`` (binary, like ``64MiB``) or ``4096``.

    Raises:
        ConfigurationError: names `field`, the text and what is right; also for less than 1 byte
            and for 2^63 bytes or more.
    """
    value = _quantity(text, _SIZE_UNITS, field, "a size such as 512MiB or 200GiB")
    if value < 1:
        raise ConfigurationError(
            f"{field}={text_without_passwords(text)}: must be at least one byte"
        )
    if value >= _TOO_LARGE:  # infinite for hundreds of digits
        raise ConfigurationError(f"{field}={text_without_passwords(text)}: must be below 8192PiB")
    return int(value)


def parse_duration(text: str, *, field: str = "duration", zero: bool = False) -> float:
    """Returns the seconds of ``7d``, ``12h``, ``30m``, ``45s``, ``500ms`` or ``45``.

    They are above 0, or with `zero` at least 0.

    Raises:
        ConfigurationError: names `field`, the text and what is right.
    """
    value = _quantity(text, _TIME_UNITS, field, "a duration such as 30s, 12h or 7d")
    if value <= 0 and not zero:
        raise ConfigurationError(f"{field}={text_without_passwords(text)}: must be above 0 seconds")
    if value > LONGEST_S:  # systems and servers refuse it only once it is used
        raise ConfigurationError(f"{field}={text_without_passwords(text)}: must be at most 36500d")
    return value


def format_size(nbytes: int) -> str:
    """Formats `nbytes` for people: ``1.5 GiB``."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"


def _quantity(text: str, units: Mapping[str, float], field: str, wanted: str) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    factor = None if match is None else units.get(match[2].lower())
    if match is None or factor is None:
        raise ConfigurationError(f"{field}={text_without_passwords(text)}: {wanted} is needed")
    return float(match[1]) * factor
