"""Runs a server process over an engine: listens, answers, and shuts down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from starlette.types import ASGIApp

from kvconnect.engine.llm import LLM
from kvconnect.errors import EngineClosed
from kvconnect.server.admission import Admission
from kvconnect.server.app import make_app
from kvconnect.server.http.http_server import HttpServer
from kvconnect.server.http.listener import Listener
from kvconnect.server.page.cache_page import CachePage
from kvconnect.server.page.store_reader import ModelTexts, StoreReader
from kvconnect.server.settings import ServerSettings
from kvconnect.server.threads import ServerThreads

__all__ = ["serve"]


def serve(
    llm: LLM,
    settings: ServerSettings,
    listener: Listener,
    ready: Callable[[], None],
    tenants: Mapping[bytes, str] | None = None,
) -> None:
    """Answers until SIGTERM or Ctrl-C, in the main thread; blocks.

    The first signal refuses new requests and waits for running ones, up to
    ``shutdown_timeout_s``; then, or at a second one, they are aborted. `llm` is the caller's to
    close; `listener` is closed when this returns. `ready` is called once clients may connect and
    signals are handled. `tenants` are names that the page shows, by the digest of the salt.

    Raises:
        ConfigurationError: another process took the port meanwhile.
        EngineClosed: the engine failed, so that the server cannot answer any more.
    """
    admission = Admission(settings.max_completions, settings.max_bodies_bytes)
    with ExitStack() as stack:
        threads = stack.enter_context(ServerThreads())
        page = None
        if settings.page:
            page = stack.enter_context(_page(llm, settings, tenants or {}))
        app = make_app(llm, settings, admission, threads, page)
        server = _EngineServer(llm, app, settings, admission, ready)
        listener.listen()
        server.run(sockets=list(listener.sockets))
    if server.failure is not None:
        raise server.failure


def _page(llm: LLM, settings: ServerSettings, tenants: Mapping[bytes, str]) -> CachePage:
    """Returns the page of a server and its store."""
    options = llm.options
    config, reader = options.connector_config, None
    if config is not None and config.url is not None:
        texts = None
        if llm.tokenizer is not None:
            texts = ModelTexts(llm.tokenizer, options.directory, options.model_revision)
        reader = StoreReader(config.url, tenants, texts)
    return CachePage(settings.model_names[0], settings, reader, of_server=True)


class _EngineServer(HttpServer):
    """The HTTP server over an engine.

    Attributes:
        failure: the error that ended the engine, if it ended by itself.
    """

    def __init__(
        self,
        llm: LLM,
        app: ASGIApp,
        settings: ServerSettings,
        admission: Admission,
        ready: Callable[[], None],
    ) -> None:
        super().__init__(app, settings, admission, ready)
        self._llm = llm
        self.failure: EngineClosed | None = None

    def has_failed(self) -> bool:
        """Returns whether the engine has ended."""
        if self.failure is None:
            try:
                self._llm.check_health()
            except EngineClosed as error:
                self.failure = error
        return self.failure is not None
