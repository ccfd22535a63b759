"""A request as the router forwards it: its body is parsed once, and its parts are encoded once."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvconnect.server.errors import RequestRefused
from kvconnect.server.route.prompt import Prompt
from kvconnect.text import shown

_AT_ONCE = 1 << 14


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request for the servers behind the router.

    Attributes:
        path: the path that it was sent to.
        prompt: its beginning.
        fields: the name and the value of each field of the body, as JSON in UTF-8.
    """

    path: str
    prompt: Prompt
    fields: Mapping[str, bytes]

    @classmethod
    def of(cls, path: str, body: Mapping[str, Any]) -> Self:
        """Returns the request that `body`, a JSON object, makes to `path`.

        Raises:
            RequestRefused: `body` has ``kv_transfer_params``, or a number too large for a float.
        """
        if body.get("kv_transfer_params") is not None:
            raise RequestRefused(
                403, "kv_transfer_params: come from the router only", "not_the_router"
            )
        fields = {
            name: b"%s:%s" % (_encoded(name), _encoded_field(name, value))
            for name, value in body.items()
            if name != "kv_transfer_params"
        }
        return cls(path, Prompt.of(path, body), fields)

    def body(
        self, carried: Mapping[str, Any] | None = None, *, without: Collection[str] = ()
    ) -> bytes:
        """Returns the JSON object for a server, with `carried` as ``kv_transfer_params``."""
        fields = [field for name, field in self.fields.items() if name not in without]
        if carried is not None:
            fields.append(b'"kv_transfer_params":' + _encoded(carried))
        return b"{" + b",".join(fields) + b"}"


def _encoded_field(name: str, value: object) -> bytes:
    try:
        return _encoded(value)
    except ValueError as error:  # parsed as infinity, which JSON cannot express
        message = f"{shown(name)}: has a number that is too large for a float"
        raise RequestRefused(400, message) from error


def _encoded(value: object) -> bytes:
    """Encodes `value` as JSON, long lists in pieces, between which other threads can run."""
    if isinstance(value, list) and len(value) > _AT_ONCE:
        return b"[" + b",".join(_pieces(value)) + b"]"
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def _pieces(values: list[object]) -> Iterator[bytes]:
    for start in range(0, len(values), _AT_ONCE):
        yield _encoded(values[start : start + _AT_ONCE])[1:-1]
