"""Serves requests without generation: tokenize, version, reset of the cache."""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from kvconnect import __version__
from kvconnect.engine.llm import LLM
from kvconnect.server.admission import Admission, Ticket
from kvconnect.server.endpoint import Endpoint, check_model
from kvconnect.server.errors import RequestRefused
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
    """Returns the paths of vLLM's server beyond OpenAI's API.

    Its arguments are those of `Endpoint`.
    """
    return [
        *(
            Route(path, _TokenEndpoint(kind, llm, settings, admission, threads), methods=["POST"])
            for path, kind in (("/tokenize", TokenizeRequest), ("/detokenize", DetokenizeRequest))
        ),
        Route("/tokenizer_info", partial(_tokenizer_info, llm)),
        Route("/version", _version),
        Route("/reset_prefix_cache", partial(_reset, llm, threads), methods=["POST"]),
    ]


class _TokenEndpoint(Endpoint[TokenRequest]):
    """Answers token requests; each counts as a completion."""

    def _admit(self, wanted: TokenRequest, request: Request, ticket: Ticket) -> None:
        check_model(self._settings, wanted.model)
        self._admission.extend(ticket, 1)

    async def _response(self, wanted: TokenRequest, request: Request, ticket: Ticket) -> Response:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads.tokenizing, lambda: JSONResponse(wanted.answer(self._llm))
        )


async def _tokenizer_info(llm: LLM, request: Request) -> Response:
    return JSONResponse(tokenizer_of(llm).info())


async def _version(request: Request) -> Response:
    return JSONResponse({"version": __version__})


async def _reset(llm: LLM, threads: ServerThreads, request: Request) -> Response:
    """Drops the cached blocks of device and host; the store keeps its blocks."""
    loop = asyncio.get_running_loop()
    if await loop.run_in_executor(threads.telling, llm.reset_prefix_cache):
        return Response()
    raise RequestRefused(
        409, "requests run, or their blocks are being saved; try again later", "cache_in_use"
    )
