"""Answers with server-sent events, as OpenAI's API does."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse

from kvconnect.server.errors import answer_of

_END = b"data: [DONE]\n\n"


def event_stream(
    contents: AsyncGenerator[dict[str, Any]], encode: Callable[[Any], str] = json.dumps
) -> StreamingResponse:
    """Answers with an event for each of `contents`, and one that ends the stream.

    An error of `contents` becomes the last event but one, since the status is sent by then.
    """
    return StreamingResponse(
        _events(contents, encode),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


def error_events(error: Exception) -> bytes:
    """Returns the end of a stream that breaks off: an event for `error`, and the last one."""
    return _event(json.dumps(answer_of(error).body)) + _END


async def _events(
    contents: AsyncGenerator[dict[str, Any]], encode: Callable[[Any], str]
) -> AsyncGenerator[bytes]:
    try:
        async with aclosing(contents):
            async for content in contents:
                yield _event(encode(content))
    except Exception as error:  # noqa: BLE001  its status is sent: it goes into the stream
        yield _event(encode(answer_of(error).body))
    yield _END


def _event(text: str) -> bytes:
    return b"data: " + text.encode() + b"\n\n"
