"""Serves the page of a store alone, without an engine."""

from __future__ import annotations

from collections.abc import Callable

from starlette.routing import Router

from kvconnect.server.admission import Admission
from kvconnect.server.http.gate import Gate
from kvconnect.server.http.http_server import HttpServer
from kvconnect.server.http.listener import Listener
from kvconnect.server.page.cache_page import CachePage
from kvconnect.server.page.settings import PageSettings
from kvconnect.server.page.store_reader import StoreReader

__all__ = ["serve_page"]


def serve_page(
    title: str,
    reader: StoreReader,
    settings: PageSettings,
    listener: Listener,
    ready: Callable[[], None],
) -> None:
    """Answers until SIGTERM or Ctrl-C, in the main thread; blocks.

    `listener` is closed when this returns, and so is `reader`. `ready` is called once browsers may
    connect.

    Raises:
        ConfigurationError: the port was taken meanwhile.
    """
    with CachePage(title, settings, reader, of_server=False) as page:
        router = Router(page.routes(), redirect_slashes=False)
        app = Gate(router, settings, settings.admin_key, has_prompts=False)
        admission = Admission(1, settings.max_bodies_bytes)
        server = HttpServer(app, settings, admission, ready)
        listener.listen()
        server.run(sockets=list(listener.sockets))
