"""The path that Prometheus scrapes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from kvconnect.prometheus import Collector


def metrics_endpoint(thread: Executor | None) -> Callable[[Request], Awaitable[Response]]:
    """Returns the endpoint that answers a scrape with this process's metrics.

    Args:
        thread: the thread that collects them; ``None``: one of the event loop's threads.
    """
    registry = CollectorRegistry()
    registry.register(Collector())

    async def scrape(request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(thread, encode, registry)
        return Response(text, media_type=kind)

    return scrape
