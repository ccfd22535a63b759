"""The requests of the clients: prompts that share prefixes, and chats of several turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvconnect_bench.serve.client import Client, Measured

__all__ = ["Chats", "SharedPrefixes", "Workload"]

_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8)


class Workload(ABC):
    """The sessions of a load. Requests of a session run in order; sessions run at once."""

    @abstractmethod
    def sessions(self) -> Sequence[Session]:
        """Returns all sessions, in the order in which they begin."""


class Session(ABC):
    """The requests of one client."""

    @abstractmethod
    async def run(self, client: Client) -> list[Measured]:
        """Sends the requests in order; returns the measurements of each.

        Raises:
            RequestFailed: a request was not answered.
        """


@dataclass(frozen=True, slots=True)
class SharedPrefixes(Workload):
    """Requests that begin with one of a few texts, taken in turn.

    Attributes:
        requests: in all.
        prefixes: texts that they begin with.
        prefix_tokens, suffix_tokens, max_tokens: of each request; each suffix is different.
        seed: of the texts.
    """

    requests: int
    prefixes: int
    prefix_tokens: int
    suffix_tokens: int
    max_tokens: int
    seed: int = 0

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
        return [_Completion(prompt, self.max_tokens) for prompt in self.prompts()]


@dataclass(frozen=True, slots=True)
class Chats(Workload):
    """Conversations: each turn's prompt is the conversation so far, and a question.

    Attributes:
        chats: in all.
        turns: of each.
        prefix_tokens: of the system prompt, the same for all.
        suffix_tokens: of each question.
        max_tokens: of each answer.
        seed: of the texts.
    """

    chats: int
    turns: int
    prefix_tokens: int
    suffix_tokens: int
    max_tokens: int
    seed: int = 0

    def sessions(self) -> Sequence[Session]:
        """Returns sessions of one chat each."""
        rng = np.random.default_rng(self.seed)
        system = _text(rng, self.prefix_tokens)
        return [
            _Chat(
                system, [_text(rng, self.suffix_tokens) for _ in range(self.turns)], self.max_tokens
            )
            for _ in range(self.chats)
        ]


@dataclass(frozen=True, slots=True)
class _Completion(Session):
    prompt: str
    max_tokens: int

    async def run(self, client: Client) -> list[Measured]:
        body = {"prompt": self.prompt, **_sampling(self.max_tokens)}
        return [await client.ask("/v1/completions", body)]


@dataclass(frozen=True, slots=True)
class _Chat(Session):
    system: str
    questions: Sequence[str]
    max_tokens: int

    async def run(self, client: Client) -> list[Measured]:
        turns: list[Measured] = []
        messages = [{"role": "system", "content": self.system}]
        for question in self.questions:
            messages.append({"role": "user", "content": question})
            body = {"messages": messages, **_sampling(self.max_tokens)}
            measured = await client.ask("/v1/chat/completions", body)
            messages.append({"role": "assistant", "content": measured.text})
            turns.append(measured)
        return turns


def _sampling(max_tokens: int) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def _text(rng: np.random.Generator, num_tokens: int) -> str:
    """Makes a random text: a token for each letter if the tokenizer is byte-level, else fewer."""
    return bytes(rng.choice(_LETTERS, num_tokens)).decode()
