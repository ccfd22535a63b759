"""Requests to the model and its cache that generate nothing: tokens, version, an empty cache."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from kvconnect import __version__
from kvconnect.engine.llm import LLM
from kvconnect.server.admission import Admission
from kvconnect.server.endpoint import check_model
from kvconnect.server.errors import RequestRefused
from kvconnect.server.http.body import read_json
from kvconnect.server.openai.token_requests import (
    DetokenizeRequest,
    TokenizeRequest,
    TokenRequest,
    tokenizer_of,
)
from kvconnect.server.settings import ServerSettings
from kvconnect.server.threads import ServerThreads

__all__ = ["engine_routes"]


def engine_routes(
    llm: LLM, settings: ServerSettings, admission: Admission, threads: ServerThreads
) -> list[BaseRoute]:
    """The paths of vLLM's server beyond OpenAI's API; arguments as of `GenerationEndpoint`."""
    cache = _Cache(llm, threads)
    return [
        *(
            Route(path, _TokenEndpoint(kind, llm, settings, admission, threads), methods=["POST"])
            for path, kind in (("/tokenize", TokenizeRequest), ("/detokenize", DetokenizeRequest))
        ),
        Route("/tokenizer_info", partial(_tokenizer_info, llm)),
        Route("/version", _version),
        Route("/reset_prefix_cache", cache.reset, methods=["POST"]),
    ]


class _TokenEndpoint:
    """An ASGI application that answers requests of one kind; each counts as a completion."""

    def __init__(
        self,
        kind: type[TokenRequest],
        llm: LLM,
        settings: ServerSettings,
        admission: Admission,
        threads: ServerThreads,
    ) -> None:
        self._kind = kind
        self._llm = llm
        self._settings = settings
        self._admission = admission
        self._threads = threads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect), self._admission.enter() as ticket:
            parsing = self._threads.parsing
            request = Request(scope, receive)
            wanted = await read_json(request, self._settings, parsing, self._kind.parse, ticket)
            check_model(self._settings, wanted.model)
            self._admission.extend(ticket, 1)
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(
                self._threads.tokenizing, lambda: JSONResponse(wanted.answer(self._llm))
            )
            await answer(scope, receive, send)


async def _tokenizer_info(llm: LLM, request: Request) -> Response:
    return JSONResponse(tokenizer_of(llm).info())


async def _version(request: Request) -> Response:
    return JSONResponse({"version": __version__})


class _Cache:
    def __init__(self, llm: LLM, threads: ServerThreads) -> None:
        self._llm = llm
        self._threads = threads

    async def reset(self, request: Request) -> Response:
        """Drops what the device and the host have cached; the store keeps what it has."""
        loop = asyncio.get_running_loop()
        if await loop.run_in_executor(self._threads.telling, self._llm.reset_prefix_cache):
            return Response()
        raise RequestRefused(
            409, "requests run, or their blocks are being saved; try again later", "cache_in_use"
        )
