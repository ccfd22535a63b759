"""Reads the body of a request within limits, and parses it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from email.message import Message
from typing import Any, TypeVar

import jiter
from starlette.requests import Request

from kvconnect.server.admission import Ticket
from kvconnect.server.errors import RequestRefused
from kvconnect.server.settings import HttpSettings
from kvconnect.text import shown

T = TypeVar("T")

_LONG_NBYTES = 1 << 14  # takes a millisecond


async def read_json(
    request: Request,
    settings: HttpSettings,
    thread: Executor,
    make: Callable[[dict[str, Any]], T],
    ticket: Ticket,
) -> T:
    """Returns the result of `make` for the JSON object that `request` carries.

    Args:
        request: the request whose body is read.
        settings: the limits of the body.
        thread: the thread that parses long bodies and calls `make` with them. One thread, because
            Python runs only one at a time.
        make: makes the result of the parsed object; must not block.
        ticket: the ticket of the request.

    Raises:
        RequestRefused: it is no JSON (400, also where it nests deeper than 200 or has a key twice),
            is not declared as such in UTF-8 and uncompressed (415), is too large or holds too many
            values for its size (413), arrives too slowly (408), or exceeds the limit of all bodies
            (429).
        ClientDisconnect: the client disconnected.
        Exception: the errors of `make`.
    """
    _check_kind(request)
    body = await read_body(request, settings, ticket)
    if len(body) < _LONG_NBYTES:
        return make(_parsed(body, settings))
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(thread, lambda: make(_parsed(body, settings)))


async def read_body(request: Request, settings: HttpSettings, ticket: Ticket) -> bytes:
    """Returns the bytes that `request` carries; arguments and errors as of `read_json`."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > settings.max_body_bytes:
        raise _too_large(settings)
    async with ticket.reading(settings.client_timeout_s):
        body = await _read(request, settings, ticket)
    ticket.hold(len(body))  # among those that are answered now
    return body


def _parsed(body: bytes, settings: HttpSettings) -> dict[str, Any]:
    try:
        parsed = parse_json(body, max_nbytes=settings.max_body_bytes)
    except TooManyValues as error:
        raise RequestRefused(413, f"the body has {error}") from error
    except ValueError as error:
        raise RequestRefused(400, f"the body is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise RequestRefused(400, f"the body is a {type(parsed).__name__}; send a JSON object")
    return parsed


def _check_kind(request: Request) -> None:
    declared = Message()
    declared["Content-Type"] = request.headers.get("content-type", "")
    # Web pages of other origins can send any other content type to a server on loopback without
    # asking.
    if declared.get_content_type() != "application/json":
        raise RequestRefused(415, "Content-Type: must be application/json")
    charset = declared.get_content_charset("utf-8")
    if charset not in {"utf-8", "utf8", "us-ascii"}:
        raise RequestRefused(415, f"Content-Type: charset={shown(charset)} is none of JSON; UTF-8")
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise RequestRefused(415, f"Content-Encoding: {shown(coding)}: send the body as it is")


async def _read(request: Request, settings: HttpSettings, ticket: Ticket) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        if len(body) + len(piece) > settings.max_body_bytes:
            raise _too_large(settings)
        ticket.hold(len(body) + len(piece))
        body += piece
    return bytes(body)


def _too_large(settings: HttpSettings) -> RequestRefused:
    return RequestRefused(413, f"the body is larger than {settings.max_body_bytes} bytes")


_MANY_PARTS = 1 << 16
_NBYTES_OF_PART = 64
_MANY_VALUES = 1 << 20
_NBYTES_OF_VALUE = 4


class TooManyValues(ValueError):
    """The error of a text with more values than its size allows."""


def parse_json(text: bytes, *, max_nbytes: int) -> Any:
    """Returns the JSON value of `text`. Call it on another thread if `text` is long.

    The number of values is bounded, since lists, objects and keys take a hundred times as long as
    characters do. A text may have 65,536 lists, objects and keys, or one for every 64 bytes of
    `max_nbytes` if that is more; and 1,048,576 values, or one for every 4 bytes.

    Args:
        text: in UTF-8.
        max_nbytes: the most bytes of a text.

    Raises:
        TooManyValues: `text` has more of them.
        ValueError: `text` is no JSON, nests deeper than 200, or an object has a key twice.
    """
    most_parts = max(_MANY_PARTS, max_nbytes // _NBYTES_OF_PART)
    most_values = max(_MANY_VALUES, max_nbytes // _NBYTES_OF_VALUE)
    if _parts(text) > most_parts or _values(text) > most_values:
        plain = _between_strings(text)  # the content of strings does not count
        _check("lists, objects and keys", _parts(plain), most_parts)
        _check("values", _values(plain), most_values)
    try:
        return jiter.from_json(text, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        if "duplicate key" in str(error):
            with suppress(RecursionError):  # the value that follows that key
                json.loads(text, object_pairs_hook=_refuse_repeated)
        raise


def _parts(text: bytes) -> int:
    return text.count(b":") + text.count(b"[") + text.count(b"{")


def _values(text: bytes) -> int:
    return text.count(b",") + 1


def _check(noun: str, found: int, most: int) -> None:
    if found > most:
        raise TooManyValues(f"{found} {noun}; at most {most} are taken")


def _between_strings(text: bytes) -> bytes:
    """Returns the JSON `text` without its strings."""
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(plain.split(b'"')[::2])


def _refuse_repeated(pairs: list[tuple[str, object]]) -> None:
    """Raises `ValueError` if an object has a key twice."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {shown(key)} is there twice")
        seen.add(key)
