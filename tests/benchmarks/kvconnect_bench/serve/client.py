"""A client of streamed requests, which measures when their pieces arrive."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import httpx2

from kvconnect.errors import KvConnectError


class RequestFailed(KvConnectError):
    """The server answered with an error, or with no tokens."""


@dataclass(slots=True)
class Measured:
    """The measurements of a request, as its client sees it.

    Attributes:
        started_at: when the request was sent, in seconds of `time.perf_counter`.
        arrived_at: when each piece with tokens came; several tokens may come in one.
        text: of all pieces.
        prompt_tokens, cached_tokens, output_tokens: as the server counts them.
    """

    started_at: float
    arrived_at: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """The time to first token, in seconds."""
        return self.arrived_at[0] - self.started_at

    @property
    def gaps_s(self) -> list[float]:
        """The seconds between pieces: inter-token latencies."""
        return [later - earlier for earlier, later in pairwise(self.arrived_at)]


class Client:
    """Asks one server; an async context manager.

    Args:
        url: of the server, without a path.
        model: as the server calls it.
        api_key: of the server; ``None``: it requires none.
        connections: at once at most.
    """

    def __init__(self, url: str, model: str, api_key: str | None, connections: int) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._model = model
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx2.Timeout(600, connect=10),
            limits=httpx2.Limits(max_connections=connections),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        # The time that a first request takes to load modules here is not the server's.
        with suppress(httpx2.HTTPError):
            await self._http.get("/v1/models", timeout=10)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, path: str, body: Mapping[str, Any]) -> Measured:
        """Streams the answer to `body` from `path`, and measures it.

        Raises:
            RequestFailed: there was no answer, an error, or no token.
        """
        asked = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        measured = Measured(time.perf_counter())
        try:
            async with self._http.stream("POST", path, json=asked | dict(body)) as answer:
                if answer.status_code != httpx2.codes.OK:
                    text = (await answer.aread()).decode(errors="replace")
                    raise RequestFailed(f"{path}: status {answer.status_code}: {text[:500]}")
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        _note(measured, json.loads(line.removeprefix("data: ")))
        except httpx2.HTTPError as error:
            raise RequestFailed(f"{path}: {type(error).__name__} {error}") from error
        if not measured.arrived_at:
            raise RequestFailed(f"{path}: no token came")
        return measured


def _note(measured: Measured, event: dict[str, Any]) -> None:
    if error := event.get("error"):
        raise RequestFailed(str(error.get("message")))
    for choice in event["choices"]:
        delta = choice.get("delta")
        if delta is not None and "role" in delta:
            continue  # before any token
        measured.arrived_at.append(time.perf_counter())
        measured.text += (choice["text"] if delta is None else delta.get("content")) or ""
    if usage := event.get("usage"):
        measured.prompt_tokens = usage["prompt_tokens"]
        measured.output_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        measured.cached_tokens = details.get("cached_tokens") or 0
