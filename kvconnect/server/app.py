"""The ASGI application of the server: OpenAI's API, health, metrics, and more of vLLM's API."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, StrictBool, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from kvconnect import __version__
from kvconnect.engine.llm import LLM
from kvconnect.engine.request.tokenizer import Tokenizer
from kvconnect.errors import ConfigurationError
from kvconnect.server.admission import Admission, Ticket
from kvconnect.server.cache_files import file_routes
from kvconnect.server.cache_verbs import cache_routes
from kvconnect.server.endpoint import Endpoint, GenerationEndpoint, Service
from kvconnect.server.errors import RequestRefused, ShuttingDown
from kvconnect.server.http.gate import Gate
from kvconnect.server.http.metrics import metrics_endpoint
from kvconnect.server.openai.chat import ChatAnswer, ChatRequest, TemplateRequest
from kvconnect.server.openai.completion import CompletionAnswer, CompletionRequest
from kvconnect.server.openai.model_request import ModelRequest, kinds_in
from kvconnect.server.page.cache_page import CachePage
from kvconnect.server.settings import ServerSettings
from kvconnect.text import check_text


def make_app(service: Service, page: CachePage | None = None) -> ASGIApp:
    """Makes the ASGI application over `service`.

    Args:
        service: the engine that answers, and what goes with it.
        page: the page that shows the cache, if there is one; the caller closes it.
    """
    settings = service.settings
    model = _Model(service.llm, settings)
    complete = GenerationEndpoint(CompletionRequest, CompletionAnswer, service)
    chat = GenerationEndpoint(ChatRequest, ChatAnswer, service)
    routes = [
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", model.all),
        Route("/v1/models/{name:path}", model.one),
        Route("/health", partial(_health, service.llm, service.admission)),
        Route("/metrics", metrics_endpoint(service.threads.telling)),
        Route("/tokenize", _TokenEndpoint(_TokenizeRequest, service), methods=["POST"]),
        Route("/detokenize", _TokenEndpoint(_DetokenizeRequest, service), methods=["POST"]),
        Route("/tokenizer_info", partial(_tokenizer_info, service.llm)),
        Route("/version", _version),
        Route("/reset_prefix_cache", partial(_reset, service), methods=["POST"]),
        *cache_routes(service),
        *file_routes(service),
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


class _TokenRequest(ModelRequest):
    """A request that the tokenizer alone answers."""

    def answer(self, llm: LLM) -> dict[str, Any]:
        """Returns the JSON object that answers it; blocks as long as the tokenizer does.

        Raises:
            ConfigurationError: the model has no tokenizer, or the text or the tokens are wrong.
        """
        raise NotImplementedError


class _TokenizeRequest(TemplateRequest, _TokenRequest):
    """A request for the tokens of a text or a conversation.

    Attributes:
        prompt: a text.
        messages: a conversation instead, which the model's chat template formats.
        add_special_tokens: true to add the special tokens that the model expects; by default for
            text only.
        return_token_strs: true to include the text of each token.
    """

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt, messages: give one of them")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens: the chat template writes them; leave it out")
        return self

    def answer(self, llm: LLM) -> dict[str, Any]:
        """Implements `_TokenRequest.answer`."""
        tokenizer = _tokenizer_of(llm)
        if self.messages is not None:
            tokens = self.formatted(llm, self.messages)["prompt_token_ids"].tolist()
        else:
            text = self.prompt or ""
            check_text("prompt", text)
            special = self.add_special_tokens is not False
            tokens = tokenizer.encode(text, special_tokens=special).tolist()
        told = {"count": len(tokens), "max_model_len": llm.max_seq_len, "tokens": tokens}
        strings = [tokenizer.text_of(one) for one in tokens] if self.return_token_strs else None
        return told | {"token_strs": strings}


def _token_ids(given: object) -> object:
    # Pydantic would report an error for each entry of a long list.
    if isinstance(given, list) and kinds_in(given) <= {int}:
        return given
    raise ValueError("must be a list of token ids")


class _DetokenizeRequest(_TokenRequest):
    """A request for the text of tokens.

    Attributes:
        tokens: the token ids.
    """

    tokens: Annotated[list[int], PlainValidator(_token_ids)]

    def answer(self, llm: LLM) -> dict[str, Any]:
        """Implements `_TokenRequest.answer`."""
        tokenizer = _tokenizer_of(llm)
        most = llm.vocab_size
        for token in self.tokens:
            if not 0 <= token < most:
                raise ConfigurationError(
                    f"tokens: {token} is outside the model's vocabulary of {most}"
                )
        return {"prompt": tokenizer.whole_text(self.tokens)}


def _tokenizer_of(llm: LLM) -> Tokenizer:
    """Returns the tokenizer of `llm`.

    Raises:
        ConfigurationError: `llm` has none.
    """
    if llm.tokenizer is None:
        raise ConfigurationError("model: its directory has no tokenizer")
    return llm.tokenizer


class _TokenEndpoint(Endpoint[_TokenRequest]):
    """Answers token requests; each counts as a completion."""

    async def _response(self, wanted: _TokenRequest, request: Request, ticket: Ticket) -> Response:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads.tokenizing, lambda: JSONResponse(wanted.answer(self._llm))
        )


async def _tokenizer_info(llm: LLM, request: Request) -> Response:
    return JSONResponse(_tokenizer_of(llm).info())


async def _version(request: Request) -> Response:
    return JSONResponse({"version": __version__})


async def _reset(service: Service, request: Request) -> Response:
    """Drops the cached blocks of device and host; the store keeps its blocks."""
    loop = asyncio.get_running_loop()
    if await loop.run_in_executor(service.threads.telling, service.llm.reset_prefix_cache):
        return Response()
    raise RequestRefused(
        409, "requests run, or their blocks are being saved; try again later", "cache_in_use"
    )
