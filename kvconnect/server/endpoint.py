"""Answers one HTTP request, from its body to the end of its answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvconnect.engine.llm import LLM
from kvconnect.engine.request.handle import RequestHandle
from kvconnect.engine.request.output import RequestOutput, StreamChunk
from kvconnect.server.admission import Admission, Ticket
from kvconnect.server.errors import RequestRefused, ShuttingDown
from kvconnect.server.http.body import read_json
from kvconnect.server.http.disconnect import while_connected
from kvconnect.server.http.event_stream import event_stream
from kvconnect.server.openai.answer import Answer, made_late
from kvconnect.server.openai.generation_request import GenerationRequest
from kvconnect.server.openai.kv_transfer import KvTransferParams
from kvconnect.server.openai.model_request import ModelRequest
from kvconnect.server.settings import ServerSettings
from kvconnect.server.threads import ServerThreads
from kvconnect.server.trust import check_transfer
from kvconnect.text import shown
from kvconnect.trace import Event, metrics, trace_headers

R = TypeVar("R", bound=ModelRequest)
G = TypeVar("G", bound=GenerationRequest)

_MANY_LOGPROBS = 1 << 12
"""The number of log probabilities above which encoding them as JSON takes milliseconds."""


_Started: TypeAlias = tuple[Answer, Sequence[RequestHandle]]
"""A running request: its answer, and its work."""


def check_model(settings: ServerSettings, name: str | None) -> None:
    """Refuses a request for a model `name` that is not served; ``None`` is always accepted.

    Raises:
        RequestRefused: the model is not served (404).
    """
    if name is not None and name not in settings.model_names:
        known = ", ".join(f"'{one}'" for one in settings.model_names)
        raise RequestRefused(
            404, f"model: {shown(name)} is not served here; {known} is", "model_not_found"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """An engine that is served, and what all endpoints over it share.

    Attributes:
        llm: the engine; the caller closes it.
        settings: the settings of the server.
        admission: the admission of all requests that it answers.
        threads: the threads for what blocks; the caller ends them.
    """

    llm: LLM
    settings: ServerSettings
    admission: Admission
    threads: ServerThreads


class Endpoint(ABC, Generic[R]):
    """An ASGI application that answers requests of one `kind` over a service."""

    def __init__(self, kind: type[R], service: Service) -> None:
        self._kind = kind
        self._llm = service.llm
        self._settings = service.settings
        self._admission = service.admission
        self._threads = service.threads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        with contextlib.suppress(ClientDisconnect), self._admission.enter() as ticket:
            request = Request(scope, receive)
            parsing = self._threads.parsing
            wanted = await read_json(request, self._settings, parsing, self._kind.parse, ticket)
            self._admit(wanted, request, ticket)
            try:
                response = await self._response(wanted, request, ticket)
                await response(scope, receive, send)
            finally:
                for handle in ticket.handles:
                    if not handle.done:
                        handle.abort()

    def _admit(self, wanted: R, request: Request, ticket: Ticket) -> None:
        """Counts `wanted`, the content of `request`, for `ticket`: as one completion.

        Raises:
            RequestRefused: it is not served here, or a limit is reached.
        """
        check_model(self._settings, wanted.model)
        self._admission.extend(ticket, 1)

    @abstractmethod
    async def _response(self, wanted: R, request: Request, ticket: Ticket) -> Response:
        """Returns the answer to send; adds the handles of the running work to `ticket`."""


class GenerationEndpoint(Endpoint[G]):
    """Answers requests for generations. A request whose client disconnects is aborted.

    Args:
        kind: the kind of the requests.
        answer: the kind of their answers; may take as long as starting a request.
        service: the engine.
    """

    def __init__(
        self, kind: type[G], answer: Callable[[G, LLM, str], Answer], service: Service
    ) -> None:
        super().__init__(kind, service)
        self._answer = answer

    def _admit(self, wanted: G, request: Request, ticket: Ticket) -> None:
        if wanted.kv_transfer_params is not None:
            check_transfer(self._settings, request.headers, wanted.kv_transfer_params)
        check_model(self._settings, wanted.model)
        if self._settings.require_salt and wanted.cache_salt is None:
            raise RequestRefused(
                400, "cache_salt: this server takes no request without one", "salt_required"
            )
        longest = self._llm.max_seq_len
        self._admission.extend(ticket, wanted.completions, wanted.max_logprobs(longest))

    async def _response(self, wanted: G, request: Request, ticket: Ticket) -> Response:
        headers = trace_headers(request.headers) if metrics.traces else {}
        return await while_connected(request.receive, self._generate(wanted, headers, ticket))

    async def _generate(self, wanted: G, headers: Mapping[str, str], ticket: Ticket) -> Response:
        answer, handles = await self._submit(wanted, headers)
        times = TokenTimes(self._settings.model_names[0], wanted.completions // len(handles))
        self._admission.submitted(ticket, handles)
        if wanted.stream:
            return event_stream(_contents(wanted, answer, handles, times), _encoded)
        outputs = await outputs_of([times.timed(handle) for handle in handles])
        more: dict[str, Any] = {}
        if wanted.hands_out:
            more["kv_transfer_params"] = KvTransferParams.handed_out(outputs[0].kv_transfer_params)
        whole = partial(answer.whole, outputs, more)
        if ticket.logprobs < _MANY_LOGPROBS:
            return Response(whole(), media_type="application/json")
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self._threads.tokenizing, whole)
        return Response(text, media_type="application/json")

    async def _submit(self, wanted: G, headers: Mapping[str, str]) -> _Started:
        """Starts `wanted`; if cancelled, returns once no thread holds it and none of it runs."""
        left = threading.Event()

        def submit() -> _Started:
            if left.is_set():
                raise ClientDisconnect
            answer = self._answer(wanted, self._llm, self._settings.model_names[0])
            return answer, wanted.submit(self._llm, headers)

        started = asyncio.get_running_loop().run_in_executor(self._threads.tokenizing, submit)
        try:
            return await asyncio.shield(started)
        except asyncio.CancelledError:
            left.set()
            started.add_done_callback(_abort_started)
            await asyncio.wait({started})
            raise


async def _contents(
    wanted: GenerationRequest, answer: Answer, handles: Sequence[RequestHandle], times: TokenTimes
) -> AsyncGenerator[dict[str, Any]]:
    """Yields the contents of the events of a streamed answer."""
    for beginning in answer.begin(handles):
        yield beginning
    async with contextlib.aclosing(stream_of(handles, wanted.completions)) as chunks:
        async for found in chunks:
            times.arrived(found.index)
            yield answer.chunk(found)
    await times.count_streamed(handles)
    if wanted.stream_options.include_usage:
        yield answer.end(await outputs_of(handles))


_encoded = partial(json.dumps, separators=(",", ":"), default=made_late)


def _abort_started(started: asyncio.Future[_Started]) -> None:
    if not started.cancelled() and started.exception() is None:
        _, handles = started.result()
        for handle in handles:
            handle.abort()


class TokenTimes:
    """The times of one request: to its first token, and between its tokens.

    A request that fails, or whose client disconnects, is not counted.

    Args:
        model: the name of the model, a label.
        completions: the completions of each prompt.
    """

    def __init__(self, model: str, completions: int) -> None:
        self._labels = (("model", model),)
        self._completions = completions
        self._last_at: dict[int, float] = {}

    def arrived(self, index: int) -> None:
        """Records the arrival of tokens of choice `index`, counted over all prompts."""
        self._last_at[index] = time.perf_counter()

    async def timed(self, handle: RequestHandle) -> RequestOutput:
        """Returns the output of `handle` once it has ended, and counts its times."""
        output = await handle
        self._count(output, handle.submitted_at, [time.perf_counter()] * len(output.outputs))
        return output

    async def count_streamed(self, handles: Sequence[RequestHandle]) -> None:
        """Counts the times of `handles`, all of which have ended."""
        for number, handle in enumerate(handles):
            first = number * self._completions
            output = await handle
            ends = [self._last_at.get(first + one.index, 0.0) for one in output.outputs]
            self._count(output, handle.submitted_at, ends)

    def _count(self, output: RequestOutput, submitted_at: float, ended_at: Sequence[float]) -> None:
        if output.ttft_ms is None or output.finish_reason == "abort":
            return
        first_s = output.ttft_ms / 1000
        metrics.emit(Event("server.first_token", first_s, labels=self._labels))
        for completion, end in zip(output.outputs, ended_at, strict=True):
            later = len(completion.token_ids) - 1
            between_s = end - submitted_at - first_s
            if later > 0 and between_s > 0:
                metrics.emit(Event("server.between_tokens", between_s / later, labels=self._labels))


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
) -> AsyncGenerator[StreamChunk]:
    """Yields the output of `handles` in the order of its arrival; leaving it aborts them.

    The index of a chunk is that of its choice, counted over all prompts. A slow consumer gets the
    output since its last chunk in one chunk.

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
            yield chunk
        return
    queue: asyncio.Queue[StreamChunk | Exception | None] = asyncio.Queue(maxsize=1)
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
                case StreamChunk() as chunk:
                    _check_ended([chunk.finish_reason])
                    yield chunk
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    queue: asyncio.Queue[StreamChunk | Exception | None], handle: RequestHandle, first: int
) -> None:
    try:
        async for chunk in handle:
            await queue.put(replace(chunk, index=first + chunk.index))
    except Exception as error:  # noqa: BLE001  raised where the queue is read
        await queue.put(error)
    else:
        await queue.put(None)


def _check_ended(reasons: Sequence[str | None]) -> None:
    # Only a shutdown aborts a request whose client is still connected.
    if "abort" in reasons:
        raise ShuttingDown
