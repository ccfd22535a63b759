"""The beginning of an answer from a decode server, before it is forwarded to the client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx2
import jiter

from kvconnect.server.route.instance import Instance, InstanceFailed

# A longer beginning is forwarded without waiting for a first token in it.
_LONGEST_BEGINNING = 1 << 20
_PASSED = ("content-type", "cache-control", "x-accel-buffering", "retry-after")


@dataclass(frozen=True, slots=True)
class Opened:
    """The beginning of an answer, and its rest.

    Attributes:
        instance: the server that answers.
        status: the status of HTTP.
        headers: the headers that are forwarded.
        beginning: the beginning of the body: all of it, or up to its first token.
        rest: yields the following pieces, or raises `InstanceFailed`; ``None``: there are none.
    """

    instance: Instance
    status: int
    headers: dict[str, str]
    beginning: bytes
    rest: AsyncIterator[bytes] | None = None

    @property
    def error_event(self) -> bool:
        """Returns whether a stream has an error instead of its first token."""
        return self.rest is not None and any("error" in one for one in _events(self.beginning))


async def begin(instance: Instance, answer: httpx2.Response) -> Opened:
    """Waits for the first token of `answer` by `instance`, or for all of it unless it is a stream.

    Raises:
        InstanceFailed: the answer is of another kind.
        httpx2.RequestError: the answer broke off.
        ValueError: an event is no JSON.
    """
    headers = {name: answer.headers[name] for name in _PASSED if name in answer.headers}
    kind = headers.get("content-type", "")
    if kind.startswith("application/json"):
        return Opened(instance, answer.status_code, headers, await answer.aread())
    if not kind.startswith("text/event-stream"):
        raise InstanceFailed(instance, "its answer is neither JSON nor events", "failed")
    pieces = answer.aiter_bytes()
    beginning = b""
    async for piece in pieces:
        beginning += piece
        too_long = len(beginning) > _LONGEST_BEGINNING
        if too_long or any(not _is_role(event) for event in _events(beginning)):
            break
    return Opened(instance, answer.status_code, headers, beginning, _rest(instance, pieces))


async def _rest(instance: Instance, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for piece in pieces:
            yield piece
    except httpx2.RequestError as error:
        raise InstanceFailed(instance, type(error).__name__, "failed") from error


def _events(data: bytes) -> list[dict[str, object]]:
    """Returns the whole events in `data`, except the last one of a stream, which is no JSON."""
    lines = data[: data.rfind(b"\n\n") + 1].split(b"\n\n")
    found = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: {")]
    return [jiter.from_json(one) for one in found]


def _is_role(event: dict[str, object]) -> bool:
    """Returns whether `event` only names the role, as the first event of a chat does."""
    choices = event.get("choices")
    return isinstance(choices, list) and any(
        isinstance(one, dict) and isinstance(one.get("delta"), dict) and "role" in one["delta"]
        for one in choices
    )
