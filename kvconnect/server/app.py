"""The ASGI application of the server: OpenAI's API, health, metrics."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from kvconnect.engine.llm import LLM
from kvconnect.server.admission import Admission
from kvconnect.server.cache_files import file_routes
from kvconnect.server.cache_verbs import cache_routes
from kvconnect.server.endpoint import GenerationEndpoint
from kvconnect.server.engine_endpoints import engine_routes
from kvconnect.server.errors import RequestRefused, ShuttingDown
from kvconnect.server.http.gate import Gate
from kvconnect.server.http.metrics import metrics_endpoint
from kvconnect.server.openai.chat_request import ChatRequest
from kvconnect.server.openai.completion_request import CompletionRequest
from kvconnect.server.openai.generation_request import GenerationRequest
from kvconnect.server.page.cache_page import CachePage
from kvconnect.server.settings import ServerSettings
from kvconnect.server.threads import ServerThreads

__all__ = ["make_app"]


def make_app(
    llm: LLM,
    settings: ServerSettings,
    admission: Admission,
    threads: ServerThreads,
    page: CachePage | None = None,
) -> ASGIApp:
    """Makes the ASGI application over `llm`.

    Args:
        llm: answers; the caller closes it.
        settings: of the server.
        admission: of the generations that it answers.
        threads: for what blocks; the caller ends them.
        page: that shows the cache, if there is one; the caller closes it.
    """
    model = _Model(llm, settings)
    kinds: dict[str, type[GenerationRequest]] = {
        "/v1/completions": CompletionRequest,
        "/v1/chat/completions": ChatRequest,
    }
    generations = [
        Route(path, GenerationEndpoint(kind, llm, settings, admission, threads), methods=["POST"])
        for path, kind in kinds.items()
    ]
    routes = [
        *generations,
        Route("/v1/models", model.all),
        Route("/v1/models/{name:path}", model.one),
        Route("/health", partial(_health, llm, admission)),
        Route("/metrics", metrics_endpoint(threads.telling)),
        *engine_routes(llm, settings, admission, threads),
        *cache_routes(llm, settings, admission, threads),
        *file_routes(llm, settings, admission, threads),
        *(() if page is None else page.routes()),
    ]
    router = Router(routes, redirect_slashes=False)
    return Gate(router, settings, settings.admin_key, settings.metrics_key)


class _Model:
    """The only model, under each of its names."""

    def __init__(self, llm: LLM, settings: ServerSettings) -> None:
        self._entries = {
            name: {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "kvconnect",
                "root": settings.model_names[0],
                "max_model_len": llm.max_seq_len,
            }
            for name in settings.model_names
        }

    async def all(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(self._entries.values())})

    async def one(self, request: Request) -> Response:
        name = request.path_params["name"]
        if (entry := self._entries.get(name)) is None:
            raise RequestRefused(404, f"model: '{name}' is not served here", "model_not_found")
        return JSONResponse(entry)


async def _health(llm: LLM, admission: Admission, request: Request) -> Response:
    """Answers whether requests are accepted, where events are published, and what keeps them."""
    if admission.closed:
        raise ShuttingDown
    llm.check_health()
    told: dict[str, Any] = {"status": "ok"}
    if (events := llm.events_address) is not None:
        told["events"] = asdict(events)
        if (problem := llm.events_problem) is not None:
            told["events"]["problem"] = problem
    return JSONResponse(told)
