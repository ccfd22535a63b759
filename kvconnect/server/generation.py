"""Waits for the engine's output of one request, as a whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass

from kvconnect.engine.request.handle import RequestHandle
from kvconnect.engine.request.output import RequestOutput, StreamChunk
from kvconnect.server.errors import ShuttingDown

__all__ = ["ChoiceChunk", "outputs_of", "stream_of"]


@dataclass(frozen=True, slots=True)
class ChoiceChunk:
    """A chunk of one choice, counted over all prompts of the request."""

    index: int
    chunk: StreamChunk


async def outputs_of(handles: Sequence[Awaitable[RequestOutput]]) -> list[RequestOutput]:
    """Waits for all of `handles`; cancelling it aborts them.

    Raises:
        ShuttingDown: a handle was aborted.
        Exception: the error of the first handle that failed.
    """
    outputs = await asyncio.gather(*handles)
    _check_ended([one.finish_reason for output in outputs for one in output.outputs])
    return outputs


async def stream_of(
    handles: Sequence[RequestHandle], completions: int
) -> AsyncGenerator[ChoiceChunk]:
    """Yields the output of `handles` in the order of its arrival; leaving it aborts them.

    A slow consumer gets the output since its last chunk in one chunk.

    Args:
        handles: a handle for each prompt.
        completions: the number of completions of all prompts together.

    Raises:
        ShuttingDown: a handle was aborted.
        Exception: the error of the first handle that failed.
    """
    each = completions // len(handles)
    if len(handles) == 1:
        async for chunk in handles[0]:
            _check_ended([chunk.finish_reason])
            yield ChoiceChunk(chunk.index, chunk)
        return
    queue: asyncio.Queue[ChoiceChunk | Exception | None] = asyncio.Queue(maxsize=1)
    tasks = [
        asyncio.create_task(_feed(queue, handle, each * number))
        for number, handle in enumerate(handles)
    ]
    try:
        running = len(tasks)
        while running:
            match await queue.get():
                case None:
                    running -= 1
                case Exception() as error:
                    raise error
                case ChoiceChunk() as found:
                    _check_ended([found.chunk.finish_reason])
                    yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    queue: asyncio.Queue[ChoiceChunk | Exception | None], handle: RequestHandle, first: int
) -> None:
    try:
        async for chunk in handle:
            await queue.put(ChoiceChunk(first + chunk.index, chunk))
    except Exception as error:  # noqa: BLE001  raised where the queue is read
        await queue.put(error)
    else:
        await queue.put(None)


def _check_ended(reasons: Sequence[str | None]) -> None:
    # Only a shutdown aborts a request whose client is still connected.
    if "abort" in reasons:
        raise ShuttingDown
