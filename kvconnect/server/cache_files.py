"""Serves ``export`` and ``import`` of the engine's store, for holders of the admin key.

An export is answered with the bytes of its file as they are made. A file to import is sent in
pieces, each a request of its own, so that a large one needs no long request and continues after an
interruption; then a verb checks all of it and stores its blocks. The list of the blocks that a
client has from an interrupted export is sent in the same way.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, cast

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from kvconnect.errors import BadFrame, ConfigurationError
from kvconnect.operations.archive import ArchiveReader
from kvconnect.operations.export import SHORT_KEY_NBYTES, Sink
from kvconnect.operations.prompt_store import PromptStore
from kvconnect.operations.result import Exported, Saved
from kvconnect.operations.run import AbortableRun
from kvconnect.server.admission import Ticket
from kvconnect.server.cache_verbs import (
    BlocksRequest,
    CountsEndpoint,
    StoreEndpoint,
    StoreRequest,
    retrieved,
)
from kvconnect.server.endpoint import Service
from kvconnect.server.errors import RequestRefused
from kvconnect.server.http.body import read_body
from kvconnect.server.http.disconnect import while_connected
from kvconnect.server.http.gate import ADMIN_PATHS
from kvconnect.server.uploads import Uploads

COUNTS_HEADER = "kvconnect-counts"
"""The header of an export with the counts that are known at its beginning, as JSON."""

_PIECE_NBYTES = 1 << 16
_LEAST_NBYTES_PER_S = 1 << 16
_FILE = r"^[0-9a-f]{32}$"


class _Export(BlocksRequest):
    """The blocks that a file is to hold.

    Attributes:
        skip: the name of a file that was sent: the first 8 bytes of the keys of blocks that the
            client has, one after the other. ``None``: it has none.
    """

    skip: Annotated[str, Field(pattern=_FILE)] | None = None


class _Import(StoreRequest):
    """The file that was sent, by its name."""

    file: Annotated[str, Field(pattern=_FILE)]


def file_routes(service: Service) -> list[BaseRoute]:
    """Returns the paths of export and import."""
    uploads = Uploads(service.settings.max_import_bytes)
    service.threads.callback(uploads.close)
    exporting = _ExportEndpoint(_Export, service)
    importing = _ImportEndpoint(_Import, service)
    exporting.uploads = importing.uploads = uploads
    return [
        Route(f"{ADMIN_PATHS}export", exporting, methods=["POST"]),
        Route(f"{ADMIN_PATHS}import", importing, methods=["POST"]),
        Route(
            f"{ADMIN_PATHS}import/{{name}}",
            partial(_upload, uploads, service),
            methods=["GET", "POST"],
        ),
    ]


async def _upload(uploads: Uploads, service: Service, request: Request) -> Response:
    """Takes a piece of a file, or says how much of it is here."""
    name, offset = request.path_params["name"], request.query_params.get("offset", "0")
    if not (len(name) == 32 and set(name) <= set("0123456789abcdef")):
        raise RequestRefused(400, "the path: 32 hexadecimal digits of the file's number are needed")
    if not (offset.isascii() and offset.isdecimal() and len(offset) < 16):
        raise RequestRefused(400, "offset: a number of bytes is needed")
    if request.method != "POST":
        return JSONResponse({"received": await asyncio.to_thread(uploads.received, name)})
    if request.headers.get("content-type") != "application/octet-stream":
        raise RequestRefused(415, "Content-Type: must be application/octet-stream")
    with service.admission.enter() as ticket:
        piece = await read_body(request, service.settings, ticket)
        received = await asyncio.to_thread(uploads.append, name, int(offset), piece)
    return JSONResponse({"received": received})


class _ImportEndpoint(CountsEndpoint):
    """Stores the blocks of a file that was sent."""

    uploads: Uploads

    def _work(self, wanted: _Import, done: Saved, store: PromptStore) -> None:
        with self.uploads.taken(wanted.file) as path:
            try:
                with ArchiveReader(path, None):
                    pass  # refuses a file with a key, and says what to do
                store.import_(path, into=done)
            except BadFrame as error:
                what = str(error).removeprefix(f"{path}: ")
                raise RequestRefused(400, f"the file {what}", "bad_file") from error
            except ConfigurationError as error:
                raise ConfigurationError(str(error).replace(str(path), "the file")) from error


class _Pipe:
    """Carries the bytes of an export from the thread that makes them to the event loop.

    The thread waits while the client reads slowly. Once the loop's end is closed, it fails.

    Args:
        grace_s: the seconds that a client may take beyond those of a slow one, which reads 64 KiB
            a second.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        read, write = os.pipe()
        self._end = os.fdopen(read, "rb")
        self.file = os.fdopen(write, "wb", buffering=_PIECE_NBYTES)
        self._transport: asyncio.BaseTransport | None = None

    async def pieces(self, work: asyncio.Future[None]) -> AsyncGenerator[bytes]:
        """Yields the bytes; raises the error of `work`, which cuts the connection.

        Raises:
            RequestRefused: the client reads too slowly.
        """
        reader = asyncio.StreamReader(limit=_PIECE_NBYTES)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._end
        )
        clock, left_s = asyncio.get_running_loop().time, self._grace_s
        while piece := await reader.read(_PIECE_NBYTES):
            taken_at = clock()
            yield piece
            left_s += len(piece) / _LEAST_NBYTES_PER_S - (clock() - taken_at)
            left_s = min(left_s, self._grace_s)
            if left_s < 0:
                raise RequestRefused(408, "the client reads too slowly", closes=True)
        await work

    def close(self) -> None:
        """Closes the loop's end; the second time does nothing."""
        if self._transport is None:
            self._end.close()
        else:
            self._transport.close()


class _Piped(StreamingResponse):
    """An answer with the bytes of a pipe, whose end it closes, even if it was never begun."""

    def __init__(self, pipe: _Pipe, work: asyncio.Future[None], headers: dict[str, str]) -> None:
        super().__init__(pipe.pieces(work), headers=headers, media_type="application/octet-stream")
        self._pipe = pipe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._pipe.close()


class _ExportEndpoint(StoreEndpoint):
    """Answers with the file of an export."""

    uploads: Uploads

    async def _response(self, wanted: StoreRequest, request: Request, ticket: Ticket) -> Response:
        asked = cast("_Export", wanted)
        run, done = AbortableRun(), Exported()
        self._admission.submitted(ticket, [run])
        loop = asyncio.get_running_loop()
        begun: asyncio.Future[int] = loop.create_future()

        def begin(blocks: int) -> None:
            loop.call_soon_threadsafe(begun.set_result, blocks)

        pipe = _Pipe(self._settings.client_timeout_s)
        sink = Sink(pipe.file, self._skipped(asked), begin)
        work = loop.run_in_executor(self._threads.sending, self._export, asked, run, done, sink)
        work.add_done_callback(retrieved)
        try:
            await while_connected(request.receive, _first([begun, work]))
            if not begun.done():
                work.result()
        except BaseException:
            pipe.close()
            raise
        known = {"blocks": begun.result(), "resumed": done.resumed, "missing": done.missing}
        more = {"missing_keys": done.missing_keys, "unknown": done.unknown}
        headers = {COUNTS_HEADER: json.dumps(known | more), "X-Accel-Buffering": "no"}
        return _Piped(pipe, work, headers)

    def _skipped(self, wanted: _Export) -> Iterator[bytes]:
        """Yields the beginnings of keys that the client sent; reads its file meanwhile."""
        if wanted.skip is None:
            return
        with self.uploads.taken(wanted.skip) as path, path.open("rb") as file:
            while len(one := file.read(SHORT_KEY_NBYTES)) == SHORT_KEY_NBYTES:
                yield one

    def _export(self, wanted: _Export, run: AbortableRun, done: Exported, sink: Sink) -> None:
        try:
            self._perform(wanted, run, lambda store: _write(wanted, done, sink, store))
        finally:
            with suppress(OSError):  # the client left
                sink.file.close()


def _write(wanted: _Export, done: Exported, sink: Sink, store: PromptStore) -> None:
    store.export(sink, into=done, **wanted.which)


async def _first(futures: Sequence[asyncio.Future[Any]]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
