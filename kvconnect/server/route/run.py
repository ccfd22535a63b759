"""The life of the router's process, and the paths it serves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import httpx2
import jiter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from kvconnect.server.admission import Admission
from kvconnect.server.errors import RequestRefused, ShuttingDown
from kvconnect.server.http.gate import Gate
from kvconnect.server.http.http_server import HttpServer
from kvconnect.server.http.listener import Listener
from kvconnect.server.http.metrics import metrics_endpoint
from kvconnect.server.route.endpoint import Routed, RouteEndpoint
from kvconnect.server.route.fleet import Fleet
from kvconnect.server.route.instance import Instance
from kvconnect.server.route.settings import RouteSettings
from kvconnect.trace import metrics

_OUTGOING = 2
"""The connections of one request: to a prefill server and to a decode server."""


def route(
    settings: RouteSettings,
    listener: Listener,
    ready: Callable[[], None],
    routed: Routed = nullcontext,
) -> None:
    """Answers until SIGTERM or Ctrl-C, in the main thread; blocks.

    Signals are handled as by `kvconnect.server.run.serve`. Servers may be down at the start: they
    get requests once they are up. `listener` is closed when this returns. `routed` is entered for
    each request, with the headers that name the client's trace, and yields those for the servers:
    by default the same.

    Raises:
        ConfigurationError: another process took the port meanwhile.
    """
    admission = Admission(settings.max_requests, settings.max_bodies_bytes, "requests")
    fleet = Fleet(settings)
    remove = metrics.add_gauges(fleet.sizes)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="kvconnect-route-parsing") as parsing:
            app = make_app(fleet, admission, parsing, routed)
            _RouteServer(fleet, app, admission, ready).answer(listener)
    finally:
        remove()


class _RouteServer(HttpServer):
    """The HTTP server of the router, which checks its servers."""

    def __init__(
        self, fleet: Fleet, app: ASGIApp, admission: Admission, ready: Callable[[], None]
    ) -> None:
        settings = fleet.settings
        most = _OUTGOING * settings.max_requests
        super().__init__(app, settings, admission, ready, max_outgoing=most, outgoing=_OUTGOING)
        self._fleet = fleet
        self._watching: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Checks all servers once, then accepts connections."""
        await ask_all(self._fleet)
        self._watching = asyncio.create_task(_watch_all(self._fleet))
        await super().startup(sockets)

    def has_failed(self) -> bool:
        """Returns whether the health checks ended, by a bug that `shutdown` raises."""
        return self._watching is not None and self._watching.done()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting, and disconnects from the servers."""
        await super().shutdown(sockets)
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait({watching})
            if not watching.cancelled():
                watching.result()
        await self._fleet.close()


async def ask_all(fleet: Fleet) -> None:
    """Checks each server once, within ``health_timeout_s``; follows the events of those up."""
    await asyncio.gather(*(_ask(fleet, one) for one in fleet))


async def _watch_all(fleet: Fleet) -> None:
    """Checks each server every ``health_interval_s``, until cancelled."""

    async def watch(instance: Instance) -> None:
        while True:
            await asyncio.sleep(fleet.settings.health_interval_s)
            await _ask(fleet, instance)

    await asyncio.gather(*map(watch, fleet))


async def _ask(fleet: Fleet, instance: Instance) -> None:
    try:
        answer = await fleet.client.get(instance, "/health")
    except (httpx2.HTTPError, TimeoutError) as error:
        instance.went_down(f"/health: {type(error).__name__}")
        fleet.events.lost(instance)
        return
    if answer.status_code == httpx2.codes.OK:
        instance.came_up()
        fleet.events.told(instance, answer)
    else:
        fleet.events.lost(instance)
        instance.drains(f"/health: status {answer.status_code}")


def make_app(
    fleet: Fleet, admission: Admission, parsing: Executor, routed: Routed = nullcontext
) -> ASGIApp:
    """Makes the ASGI application over `fleet`.

    Args:
        fleet: the servers; the caller closes it.
        admission: of the requests that are answered.
        parsing: one thread, where long bodies are parsed; the caller ends it.
        routed: as of `RouteEndpoint`.
    """
    endpoint = RouteEndpoint(fleet, admission, parsing, routed)
    monitor = _Monitor(fleet, admission)
    routes = [
        Route("/v1/completions", endpoint, methods=["POST"]),
        Route("/v1/chat/completions", endpoint, methods=["POST"]),
        Route("/v1/models", monitor.models),
        Route("/v1/models/{name:path}", monitor.model),
        Route("/health", monitor.health),
        Route("/metrics", metrics_endpoint(None)),
    ]
    return Gate(Router(routes, redirect_slashes=False), fleet.settings)


class _Monitor:
    def __init__(self, fleet: Fleet, admission: Admission) -> None:
        self._fleet = fleet
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
                answer = await self._fleet.client.get(instance, "/v1/models")
                answer.raise_for_status()
                found: dict[str, Any] = jiter.from_json(answer.content)
                known = all(isinstance(one["id"], str) for one in found["data"])
            except (httpx2.HTTPError, TimeoutError, ValueError, LookupError, TypeError):
                continue
            if known:
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
