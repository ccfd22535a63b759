"""The ASGI application of the router: OpenAI's API from its servers, health, metrics."""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import nullcontext
from typing import Any

import httpx2
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from kvconnect.server.admission import Admission
from kvconnect.server.errors import RequestRefused, ShuttingDown
from kvconnect.server.http.gate import Gate
from kvconnect.server.http.metrics import metrics_endpoint
from kvconnect.server.route.client import InstanceClient
from kvconnect.server.route.endpoint import Routed, RouteEndpoint
from kvconnect.server.route.fleet import Fleet
from kvconnect.server.route.settings import RouteSettings

__all__ = ["make_app"]


def make_app(
    fleet: Fleet,
    client: InstanceClient,
    settings: RouteSettings,
    admission: Admission,
    parsing: Executor,
    routed: Routed = nullcontext,
) -> ASGIApp:
    """Makes the ASGI application over `fleet`.

    Args:
        fleet: of the servers.
        client: asks them; the caller closes it.
        settings: of the router.
        admission: of the requests that are answered.
        parsing: one thread, where long bodies are parsed; the caller ends it.
        routed: as of `RouteEndpoint`.
    """
    endpoint = RouteEndpoint(fleet, client, settings, admission, parsing, routed)
    monitor = _Monitor(fleet, client, admission)
    routes = [
        Route("/v1/completions", endpoint, methods=["POST"]),
        Route("/v1/chat/completions", endpoint, methods=["POST"]),
        Route("/v1/models", monitor.models),
        Route("/v1/models/{name:path}", monitor.model),
        Route("/health", monitor.health),
        Route("/metrics", metrics_endpoint(None)),
    ]
    return Gate(Router(routes, redirect_slashes=False), settings)


class _Monitor:
    def __init__(self, fleet: Fleet, client: InstanceClient, admission: Admission) -> None:
        self._fleet = fleet
        self._client = client
        self._admission = admission

    async def models(self, request: Request) -> Response:
        """Answers with the models of a decode server; all servers have the same."""
        return JSONResponse(await self._models())

    async def model(self, request: Request) -> Response:
        """Answers with one of these models."""
        name = request.path_params["name"]
        for one in (await self._models())["data"]:
            if one["id"] == name:
                return JSONResponse(one)
        raise RequestRefused(404, f"model: '{name}' is not served here", "model_not_found")

    async def _models(self) -> dict[str, Any]:
        for instance in self._fleet.decode:
            if instance.down is not None:
                continue
            try:
                answer = await self._client.get(instance, "/v1/models")
                answer.raise_for_status()
                found: dict[str, Any] = answer.json()
            except (httpx2.HTTPError, TimeoutError, ValueError):
                continue
            return found
        raise RequestRefused(503, "no decode server answers", "no_decode_server")

    async def health(self, request: Request) -> Response:
        """Answers whether requests are accepted, and how many servers are up."""
        if self._admission.closed:
            raise ShuttingDown
        up = {
            role: f"{sum(one.down is None for one in servers)} of {len(servers)} up"
            for role, servers in (("prefill", self._fleet.prefill), ("decode", self._fleet.decode))
        }
        if all(one.down is not None for one in self._fleet.decode):
            raise RequestRefused(503, "no decode server is up", "no_decode_server")
        return JSONResponse({"status": "ok"} | up)
