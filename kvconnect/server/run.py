"""Runs a server process over an engine: listens, answers, and shuts down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from starlette.types import ASGIApp

from kvconnect.engine.llm import LLM
from kvconnect.errors import ConfigurationError, EngineClosed
from kvconnect.server.admission import Admission
from kvconnect.server.app import make_app
from kvconnect.server.endpoint import Service
from kvconnect.server.http.http_server import HttpServer
from kvconnect.server.http.listener import Listener
from kvconnect.server.page.cache_page import CachePage
from kvconnect.server.page.store_reader import ModelTexts, StoreReader
from kvconnect.server.settings import ServerSettings
from kvconnect.server.threads import ServerThreads


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
        app = make_app(Service(llm, settings, admission, threads), page)
        server = _EngineServer(llm, app, settings, admission, ready)
        server.answer(listener)
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


def read_template(path: str) -> str:
    """Returns the template in the file `path`.

    Raises:
        ConfigurationError: the file cannot be read, or is no Jinja template.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--chat-template: '{path}' cannot be read ({error})") from error
    # Like transformers, whose templates use `{% generation %}` and `{% break %}`.
    extensions = ["jinja2.ext.loopcontrols"]
    plain = text.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    try:
        ImmutableSandboxedEnvironment(extensions=extensions).parse(plain)
    except TemplateSyntaxError as error:
        raise ConfigurationError(
            f"--chat-template: '{path}' is no template: line {error.lineno}: {error}"
        ) from error
    return text


def use_template(llm: LLM, template: str) -> None:
    """Makes `template` format the chats of `llm`.

    Raises:
        ConfigurationError: the model has no tokenizer.
    """
    if llm.tokenizer is None:
        raise ConfigurationError(
            "--chat-template: a chat needs a tokenizer, which the model's directory lacks"
        )
    llm.tokenizer.use_chat_template(template)
