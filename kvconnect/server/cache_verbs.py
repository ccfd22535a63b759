"""Serves the verbs on stored prompts over HTTP, for clients with the admin key."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from kvconnect.engine.llm import LLM
from kvconnect.errors import BadFrame, ConfigurationError
from kvconnect.operations.progress import is_shown
from kvconnect.operations.prompt_store import PromptStore
from kvconnect.operations.result import Pinned, Result, Saved
from kvconnect.operations.run import AbortableRun
from kvconnect.operations.which import Which
from kvconnect.server.admission import Ticket
from kvconnect.server.endpoint import Endpoint, Service
from kvconnect.server.errors import ShuttingDown
from kvconnect.server.http.disconnect import while_connected
from kvconnect.server.http.event_stream import event_stream
from kvconnect.server.http.gate import ADMIN_PATHS
from kvconnect.server.openai.model_request import ModelRequest

_SECONDS_BETWEEN_EVENTS = 1.0


class StoreRequest(ModelRequest):
    """A request to do something with the engine's store.

    Attributes:
        stream: answer with server-sent events: the counts each second, and at the end.
    """

    stream: bool = False

    result: ClassVar[type[Result]] = Saved

    @property
    def of_model(self) -> bool:
        """Returns whether only blocks of the served model are meant."""
        return self.model is not None


class BlocksRequest(StoreRequest):
    """The blocks that a verb is about; the fields are those of `Which`.

    Attributes:
        all_models: with `everything` and no `model`: blocks of every model.
    """

    prompts: Any = None
    messages: Any = None
    keys: tuple[str, ...] | None = None
    salt: str | list[str | None] | None = None
    lora: str | None = None
    everything: bool = False
    all_models: bool = False

    @model_validator(mode="after")
    def _says_of_which_model(self) -> Self:
        if self.all_models and (self.model is not None or not self.everything):
            raise ValueError("all_models: only with everything, and without model")
        if self.everything and self.model is None and not self.all_models:
            # A store may serve many models, and a request without one means the served model
            # everywhere else.
            raise ValueError(
                "everything: give the model whose blocks are meant; or all_models: true, for the "
                "blocks of every model in the store"
            )
        return self

    @property
    def which(self) -> Which:
        """Returns the arguments that choose the blocks."""
        given = {name: getattr(self, name) for name in Which.__annotations__}
        return cast("Which", {name: value for name, value in given.items() if value is not None})

    @property
    def of_model(self) -> bool:
        """Returns whether the verb applies only to blocks of the served model."""
        return not (self.model is None and self.prompts is None and self.messages is None)


class _VerbRequest(BlocksRequest):
    """A verb that answers with counts."""

    @abstractmethod
    def perform(self, store: PromptStore, llm: LLM, done: Any) -> None:
        """Performs the verb; blocks, and updates the counts in `done`, a `result`."""


class _Warm(_VerbRequest):
    def perform(self, store: PromptStore, llm: LLM, done: Any) -> None:
        store.warm(llm, into=done, **self.which)


@dataclass(slots=True)
class _Dropped(Result):
    """The result of a drop by a server.

    Attributes:
        engine_cleared: true if the engine dropped all of its own cached blocks, too. It cannot
            while requests run.
    """

    engine_cleared: bool = False


class _Drop(_VerbRequest):
    continued: bool = False
    dry_run: bool = False

    result = _Dropped

    def perform(self, store: PromptStore, llm: LLM, done: Any) -> None:
        def clear() -> None:
            # Before the store's blocks are listed, so that the engine saves none of them again.
            done.engine_cleared = llm.reset_prefix_cache()

        store.drop(
            continued=self.continued, dry_run=self.dry_run, before=clear, into=done, **self.which
        )


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


def cache_routes(service: Service) -> list[BaseRoute]:
    """Returns the paths of the verbs."""
    return [
        Route(f"{ADMIN_PATHS}{verb}", CountsEndpoint(kind, service), methods=["POST"])
        for verb, kind in _KINDS.items()
    ]


class StoreEndpoint(Endpoint[StoreRequest]):
    """Works on the engine's store for clients; each counts as a completion.

    Verbs run one after the other. Exports run beside them, since clients may read slowly.
    Work whose client leaves ends after the call to the store that it makes.
    """

    def _perform(
        self, wanted: StoreRequest, run: AbortableRun, work: Callable[[PromptStore], None]
    ) -> None:
        """Calls `work` with the store, on a thread for verbs; `run` runs its coroutine."""
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
            work(store)
        except BadFrame:
            pass  # all is done but for those, which the result counts
        except asyncio.CancelledError as error:
            raise ShuttingDown from error


class CountsEndpoint(StoreEndpoint):
    """Answers with the counts of the work, at its end or each second, too."""

    def _work(self, wanted: Any, done: Any, store: PromptStore) -> None:
        """Does what `wanted` asks for, and counts in `done`, its `result`; blocks."""
        wanted.perform(store, self._llm, done)

    async def _response(self, wanted: StoreRequest, request: Request, ticket: Ticket) -> Response:
        run, done = AbortableRun(), wanted.result()
        self._admission.submitted(ticket, [run])
        loop = asyncio.get_running_loop()
        do = partial(self._work, wanted, done)
        work = loop.run_in_executor(self._threads.verbs, self._perform, wanted, run, do)
        work.add_done_callback(retrieved)
        if wanted.stream:
            return event_stream(_counts(work, done))
        await while_connected(request.receive, work)
        return JSONResponse(done.numbers())


def retrieved(work: asyncio.Future[None]) -> None:
    """Takes the error of `work`, which asyncio would log if the client left and nothing waits."""
    if not work.cancelled():
        work.exception()


async def _counts(work: asyncio.Future[None], done: Result) -> AsyncGenerator[dict[str, Any]]:
    while not work.done():
        await asyncio.wait({work}, timeout=_SECONDS_BETWEEN_EVENTS)
        if not work.done():
            yield done.numbers()
    work.result()
    yield done.numbers()
