"""The store URLs, such as ``disk:///var/cache/kv?capacity=200GiB&ttl=7d``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvconnect.errors import ConfigurationError, nearest
from kvconnect.quantities import format_size, parse_duration, parse_size
from kvconnect.redaction import (
    HIDDEN,
    is_hosts,
    shown_url,
    text_without_passwords,
    with_marked_commas,
    without_passwords,
)

__all__ = [
    "StoreUrl",
    "format_size",
    "parse_duration",
    "parse_size",
    "without_codec",
    "without_passwords",
]

_OF_EVERY_SCHEME = ("codec", "key_file")
_ENCODED = (
    "in user, password and parameters write %2F for '/', %3F for '?', %23 for '#', %26 for '&', "
    "%40 for '@', %5B for '['"
)


def without_codec(text: str) -> str:
    """Returns the store URL `text` without codec and key file: for raw access to stored frames."""
    start, mark, query = text.partition("?")
    kept = [one for one in query.split("&") if one.partition("=")[0] not in _OF_EVERY_SCHEME]
    return start + (mark + "&".join(kept) if any(kept) else "")


@dataclass(frozen=True, slots=True, repr=False)
class StoreUrl:
    """A store URL, split into its parts. Neither ``str()`` nor ``repr()`` of it shows a password.

    Attributes:
        scheme: lower case, names the backend.
        location: host, port and credentials as written; empty for local stores.
        path: percent-decoded.
        query: its parameters; read them with the getters, after `allow`.
        codec, key_file: parameters of every scheme, not in `query`: see `open_backend`.
    """

    scheme: str
    location: str = ""
    path: str = ""
    query: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    codec: str | None = None
    key_file: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the store URL `text`.

        Raises:
            ConfigurationError: no scheme, a fragment, a parameter given twice or without a value.
        """
        shown = without_passwords(text)
        if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text):
            raise ConfigurationError(
                f"store URL '{shown}': a scheme is needed, as in disk:///var/cache/kv or memory:"
            )
        # The library's messages quote what they are about, and so would a traceback.
        try:
            parts = urlsplit(text)
        except ValueError:
            raise ConfigurationError(
                f"store URL '{shown}': {_ENCODED}; '[' and ']' are for IPv6 addresses"
            ) from None
        if parts.fragment:
            raise ConfigurationError(
                f"store URL '{shown}': write %23 for '#' in a path or a password"
            )
        if _may_hold_a_password(parts):
            raise ConfigurationError(f"store URL '{shown}': {_ENCODED}")
        try:
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            raise ConfigurationError(
                f"store URL '{shown}': bad query field: write name=value, joined by '&'; {_ENCODED}"
            ) from None
        query: dict[str, str] = {}
        raw = dict(field.partition("=")[::2] for field in parts.query.split("&"))
        for name, value in pairs:
            label = name if name in shown else HIDDEN
            if name in query:
                raise ConfigurationError(f"store URL '{shown}': {label} is given twice")
            if not value:
                raise ConfigurationError(f"store URL '{shown}': {label} has no value")
            query[name] = (
                with_marked_commas(raw[name]) if name == "tiers" and name in raw else value
            )
        path = unquote(parts.path)
        codec, key_file = (query.pop(name, None) for name in _OF_EVERY_SCHEME)
        codec = codec and codec.replace(" ", "+")  # which "+" stands for in a query
        scheme = parts.scheme.lower()
        return cls(scheme, parts.netloc, path, MappingProxyType(query), codec, key_file)

    def __str__(self) -> str:
        generic = {"codec": self.codec, "key_file": self.key_file}
        given = {name: value for name, value in generic.items() if value}
        return shown_url(
            self.scheme,
            location=self.location or None,
            path=self.path,
            query=[*self.query.items(), *given.items()],
        )

    def __repr__(self) -> str:
        return f"StoreUrl({str(self)!r})"

    def allow(self, *names: str) -> None:
        """Refuses parameters other than `names`.

        Raises:
            ConfigurationError: an unknown one; names the nearest valid one.
        """
        shown = str(self)
        for name in self.query:
            if name == "quota" and name not in names:
                raise ConfigurationError(
                    f"{shown}: quota: this store does not decide what is dropped; disk and memory "
                    "stores do, also as tiers, and take a quota"
                )
            if name not in names and name in shown:
                hint = nearest(name, (*names, *_OF_EVERY_SCHEME))
                raise ConfigurationError(f"{shown}: unknown parameter '{name}'; {hint}")
            if name not in names:  # it may be a part of a password
                raise ConfigurationError(f"{shown}: unknown parameter '{HIDDEN}'; {_ENCODED}")

    def size(self, name: str) -> int | None:
        """Returns parameter `name` in bytes; ``None`` if it is not given."""
        text = self.query.get(name)
        return None if text is None else parse_size(text, field=name)

    def duration(self, name: str) -> float | None:
        """Returns parameter `name` in seconds; ``None`` if it is not given."""
        text = self.query.get(name)
        return None if text is None else parse_duration(text, field=name)

    def whole(self, name: str, default: int) -> int:
        """Returns parameter `name`, a whole number; `default` if it is not given."""
        text = self.query.get(name, str(default))
        if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
            raise ConfigurationError(f"{name}={text}: a whole number such as {default} is needed")
        return int(text)

    def fraction(self, name: str, default: float) -> float:
        """Returns parameter `name`, from 0 to 1; `default` if it is not given."""
        text = self.query.get(name, f"{default:g}")
        if not re.fullmatch(r"[01]|[01]?\.\d{1,9}", text, re.ASCII) or float(text) > 1:
            raise ConfigurationError(
                f"{name}={text_without_passwords(text)}: a number from 0 to 1 is needed, as 0.5"
            )
        return float(text)

    def choice(self, name: str, *choices: str) -> str:
        """Returns parameter `name`, one of `choices`; the first of them if it is not given."""
        text = self.query.get(name, choices[0])
        if text not in choices:
            raise ConfigurationError(
                f"{name}={text_without_passwords(text)}: unknown; {nearest(text, choices)}"
            )
        return text


def _may_hold_a_password(parts: SplitResult) -> bool:
    """Returns whether text before a "@" in path or parameters may be the end of a password."""
    at = "@" in parts.netloc
    if "@" in parts.path and (at or ":" in parts.netloc):
        return True
    return not at and "@" in parts.query and not is_hosts(parts.netloc)
