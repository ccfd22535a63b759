"""Serves the verbs on the prompts of the engine's store, for holders of the admin key."""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from kvconnect.engine.llm import LLM
from kvconnect.errors import BadFrame, ConfigurationError
from kvconnect.operations.pin import Pinned
from kvconnect.operations.progress import is_shown
from kvconnect.operations.prompt_store import PromptStore
from kvconnect.operations.result import Result
from kvconnect.operations.run import AbortableRun
from kvconnect.operations.saving import Saved
from kvconnect.operations.which import Which
from kvconnect.server.admission import Admission, Ticket
from kvconnect.server.endpoint import Endpoint, check_model
from kvconnect.server.errors import ShuttingDown, answer_of
from kvconnect.server.http.disconnect import while_connected
from kvconnect.server.http.gate import ADMIN_PATHS
from kvconnect.server.openai.model_request import ModelRequest
from kvconnect.server.settings import ServerSettings
from kvconnect.server.threads import ServerThreads

__all__ = ["cache_routes"]

_SECONDS_BETWEEN_EVENTS = 1.0


class _VerbRequest(ModelRequest):
    """The prompts that a verb is about; the fields are those of `Which`.

    Attributes:
        stream: answer with events: the counts so far each second, and at the end.
    """

    prompts: Any = None
    messages: Any = None
    keys: tuple[str, ...] | None = None
    salt: str | list[str | None] | None = None
    lora: str | None = None
    everything: bool = False
    stream: bool = False

    @property
    def which(self) -> Which:
        """Returns the blocks that are meant."""
        which: Which = {
            "salt": self.salt,
            "lora": self.lora,
            "everything": self.everything,
        }
        if self.keys is not None:
            which["keys"] = self.keys
        if self.prompts is not None:
            which["prompts"] = self.prompts
        if self.messages is not None:
            which["messages"] = self.messages
        return which

    @property
    def of_model(self) -> bool:
        """Returns whether only blocks of the served model are meant."""
        return not (self.model is None and self.prompts is None and self.messages is None)

    result: ClassVar[type[Result]] = Saved

    @abstractmethod
    def perform(self, store: PromptStore, llm: LLM, done: Any) -> None:
        """Does the work; blocks, and counts in `done`, a `result`, meanwhile."""


class _Warm(_VerbRequest):
    def perform(self, store: PromptStore, llm: LLM, done: Any) -> None:
        store.warm(llm, into=done, **self.which)


@dataclass(slots=True)
class _Dropped(Result):
    """The result of a drop by a server.

    Attributes:
        engine_cleared: whether the engine dropped its own cached blocks, too, all of them. It does
            not while requests run.
    """

    engine_cleared: bool = False


class _Drop(_VerbRequest):
    continued: bool = False
    dry_run: bool = False

    result = _Dropped

    def perform(self, store: PromptStore, llm: LLM, done: Any) -> None:
        if not self.dry_run:
            # First, so that the engine saves none of them again.
            done.engine_cleared = llm.reset_prefix_cache()
        store.drop(continued=self.continued, dry_run=self.dry_run, into=done, **self.which)


class _Pin(_VerbRequest):
    for_s: Annotated[float, Field(gt=0)] | None = None

    result = Pinned

    def perform(self, store: PromptStore, llm: LLM, done: Any) -> None:
        store.pin(for_s=self.for_s, into=done, **self.which)


class _Unpin(_VerbRequest):
    result = Pinned

    def perform(self, store: PromptStore, llm: LLM, done: Any) -> None:
        store.unpin(into=done, **self.which)


class _Prefetch(_VerbRequest):
    def perform(self, store: PromptStore, llm: LLM, done: Any) -> None:
        store.prefetch(into=done, **self.which)


_KINDS: Mapping[str, type[_VerbRequest]] = {
    "warm": _Warm,
    "drop": _Drop,
    "pin": _Pin,
    "unpin": _Unpin,
    "prefetch": _Prefetch,
}


def cache_routes(
    llm: LLM, settings: ServerSettings, admission: Admission, threads: ServerThreads
) -> list[BaseRoute]:
    """Returns the paths of the verbs; arguments as of `Endpoint`."""
    return [
        Route(
            f"{ADMIN_PATHS}{verb}",
            _VerbEndpoint(kind, llm, settings, admission, threads),
            methods=["POST"],
        )
        for verb, kind in _KINDS.items()
    ]


class _VerbEndpoint(Endpoint[_VerbRequest]):
    """Performs verbs, one after the other; each counts as a completion.

    A verb whose client leaves ends after the call to the store that it makes.
    """

    def _admit(self, wanted: _VerbRequest, request: Request, ticket: Ticket) -> None:
        check_model(self._settings, wanted.model)
        self._admission.extend(ticket, 1)

    async def _response(self, wanted: _VerbRequest, request: Request, ticket: Ticket) -> Response:
        run, done = AbortableRun(), wanted.result()
        self._admission.submitted(ticket, [run])
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads.verbs, self._perform, wanted, run, done)
        if wanted.stream:
            return StreamingResponse(
                _events(work, done),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )
        await while_connected(request.receive, work)
        return JSONResponse(done.numbers())

    def _perform(self, wanted: _VerbRequest, run: AbortableRun, done: Result) -> None:
        is_shown.set(False)
        options = self._llm.options
        config = options.connector_config
        if config is None or config.url is None:
            raise ConfigurationError("this server has no store (--store)")
        store = PromptStore(
            config.url,
            options.directory if wanted.of_model else None,
            model_revision=options.model_revision if wanted.of_model else None,
            run=run,
        )
        try:
            wanted.perform(store, self._llm, done)
        except BadFrame:
            pass  # all is done but for those, which `done` counts
        except asyncio.CancelledError as error:
            raise ShuttingDown from error


async def _events(work: asyncio.Future[None], done: Result) -> AsyncGenerator[bytes]:
    while not work.done():
        await asyncio.wait({work}, timeout=_SECONDS_BETWEEN_EVENTS)
        if not work.done():
            yield _event(done.numbers())
    try:
        work.result()
        yield _event(done.numbers())
    except Exception as error:  # noqa: BLE001  its status is sent: it goes into the stream
        yield _event(answer_of(error).body)
    yield b"data: [DONE]\n\n"


def _event(content: Mapping[str, object]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
