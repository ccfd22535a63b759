"""The requests of the clients: prompts that share prefixes, and chats of several turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from kvconnect_bench.serve.client import Client, Measured

_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8)


Session: TypeAlias = Callable[[Client], Awaitable[list[Measured]]]
"""Sends the requests of one client in order, and returns the measurements of each.

Raises:
    RequestFailed: a request was not answered.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(ABC):
    """The sessions of a load. Requests of a session run in order; sessions run at once.

    Attributes:
        prefix_tokens: of a text that several requests begin with.
        suffix_tokens: of the text that follows, which is different in each request.
        max_tokens: of each answer.
        seed: of the texts.
    """

    prefix_tokens: int
    suffix_tokens: int
    max_tokens: int
    seed: int = 0

    @abstractmethod
    def sessions(self) -> Sequence[Session]:
        """Returns all sessions, in the order in which they begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes(Workload):
    """Requests that begin with one of a few texts, taken in turn.

    Attributes:
        requests: in all.
        prefixes: texts that they begin with.
    """

    requests: int
    prefixes: int

    def prompts(self) -> list[str]:
        """Returns all prompts, in the order in which they are sent."""
        rng = np.random.default_rng(self.seed)
        prefixes = [_text(rng, self.prefix_tokens) for _ in range(self.prefixes)]
        return [
            prefixes[number % self.prefixes] + _text(rng, self.suffix_tokens)
            for number in range(self.requests)
        ]

    def sessions(self) -> Sequence[Session]:
        """Returns sessions of one request each."""
        return [partial(_complete, prompt, self.max_tokens) for prompt in self.prompts()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats(Workload):
    """Conversations: each turn's prompt is the conversation so far, and a question.

    The system prompt is the same for all.

    Attributes:
        chats: in all.
        turns: of each.
    """

    chats: int
    turns: int

    def sessions(self) -> Sequence[Session]:
        """Returns sessions of one chat each."""
        rng = np.random.default_rng(self.seed)
        system = _text(rng, self.prefix_tokens)
        questions = [
            [_text(rng, self.suffix_tokens) for _ in range(self.turns)] for _ in range(self.chats)
        ]
        return [partial(_chat, system, asked, self.max_tokens) for asked in questions]


async def _complete(prompt: str, max_tokens: int, client: Client) -> list[Measured]:
    return [await client.ask("/v1/completions", {"prompt": prompt, **_sampling(max_tokens)})]


async def _chat(
    system: str, questions: Sequence[str], max_tokens: int, client: Client
) -> list[Measured]:
    turns: list[Measured] = []
    messages = [{"role": "system", "content": system}]
    for question in questions:
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, **_sampling(max_tokens)}
        measured = await client.ask("/v1/chat/completions", body)
        messages.append({"role": "assistant", "content": measured.text})
        turns.append(measured)
    return turns


def _sampling(max_tokens: int) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def _text(rng: np.random.Generator, num_tokens: int) -> str:
    """Makes a random text: a token for each letter if the tokenizer is byte-level, else fewer."""
    return bytes(rng.choice(_LETTERS, num_tokens)).decode()
