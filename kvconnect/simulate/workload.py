"""Generates synthetic traces: shared system prompts, chats and agents, as a cache sees them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, count
from random import Random
from typing import NamedTuple

from kvconnect.errors import ConfigurationError, nearest
from kvconnect.simulate.trace_reader import DEFAULT_HASH_TOKENS

_ANSWER_TOKENS_PER_S = 50.0
"""The speed of the imagined engine's answers; the next turn of a session begins after one."""


class Kind(NamedTuple):
    """A kind of session. Lengths are medians of log-normal distributions.

    Attributes:
        turns: mean of a geometric distribution.
        system_factor: how long its system prompts are, relative to ``Workload.system_tokens``.
        first_tokens: the first tokens of the user's first message, document or task.
        input_tokens: that each later turn adds: a message, or the result of a tool.
        output_tokens: tokens of each answer, or call of a tool.
        pause_s: mean of the exponential time from an answer to the next turn.
        spread: sigma of the log-normal distributions.
    """

    turns: float
    system_factor: float
    first_tokens: float
    input_tokens: float
    output_tokens: float
    pause_s: float
    spread: float


KINDS: Mapping[str, Kind] = {
    "prompt": Kind(1, 1, 700, 0, 250, 0, 1.0),
    "chat": Kind(6, 0.5, 150, 120, 300, 45, 1.0),
    "agent": Kind(20, 2, 900, 450, 90, 4, 0.8),
}
"""Single prompts behind a shared system prompt; chats; agents that call tools in a loop."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A synthetic trace; equal settings give equal traces.

    Attributes:
        num_requests: lines.
        seed: the random seed of all that is random.
        requests_per_s: about so many once sessions of all ages are live. Sessions begin as a
            Poisson process; so do the requests of kind ``prompt``.
        mix: share of the requests that each of `KINDS` has, about.
        system_prompts: different ones of each kind; the n-th is used ``1 / n`` as often as the
            first.
        system_tokens: about their length; always whole stretches of `hash_tokens`, as a hash id
            cannot be shared in part.
        max_tokens: a session ends before prompt and answer exceed it.
        hash_tokens: tokens per hash id.

    Raises:
        ConfigurationError: names the field, the value and what is right.
    """

    num_requests: int
    seed: int = 0
    requests_per_s: float = 10.0
    mix: Mapping[str, float] = field(
        default_factory=lambda: {"prompt": 0.2, "chat": 0.4, "agent": 0.4}
    )
    system_prompts: int = 16
    system_tokens: int = 1536
    max_tokens: int = 32_768
    hash_tokens: int = DEFAULT_HASH_TOKENS

    def __post_init__(self) -> None:
        for name, least in (
            ("num_requests", 1),
            ("system_prompts", 1),
            ("system_tokens", 0),
            ("hash_tokens", 2),
        ):
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name}: {getattr(self, name)} must be at least {least}")
        if self.hash_tokens % 2:
            raise ConfigurationError(f"hash_tokens: {self.hash_tokens} must be even")
        if not 1e-6 <= self.requests_per_s <= 1e6:
            raise ConfigurationError(
                f"requests_per_s: {self.requests_per_s} must be between 1e-6 and 1e6"
            )
        for name, share in self.mix.items():
            if name not in KINDS:
                raise ConfigurationError(f"mix: '{name}' is unknown; {nearest(name, KINDS)}")
            if not 0 <= share < math.inf:
                raise ConfigurationError(f"mix: {name}={share} must be 0 or more")
        if not sum(self.mix.values()) > 0:
            raise ConfigurationError("mix: at least one kind needs a share above 0")
        longest = max(self._system_stretches(kind) for kind in KINDS.values()) * self.hash_tokens
        if self.max_tokens < longest + 512:
            raise ConfigurationError(
                f"max_tokens: {self.max_tokens} leaves no room after system prompts of up to "
                f"{longest} tokens; give {longest + 512} or more"
            )

    def lines(self) -> Iterator[str]:
        """Yields the trace, in order of time, each line with its newline.

        Keeps live sessions only.
        """
        random = Random(self.seed)
        ids = count()
        prompts = {name: self._make_system_prompts(kind, ids) for name, kind in KINDS.items()}
        weights = list(accumulate(1 / (n + 1) for n in range(self.system_prompts)))
        starts = {name: share / KINDS[name].turns for name, share in self.mix.items()}
        names, starts_up_to = list(starts), list(accumulate(starts.values()))
        sessions_per_s = self.requests_per_s * starts_up_to[-1] / sum(self.mix.values())
        due: list[tuple[float, int, _Session]] = []
        next_start, started = random.expovariate(sessions_per_s), 0
        written = 0
        while written < self.num_requests:
            while not due or next_start <= due[0][0]:
                (name,) = random.choices(names, cum_weights=starts_up_to)
                (system,) = random.choices(prompts[name], cum_weights=weights)
                session = _Session(KINDS[name], system, self, random, ids)
                heapq.heappush(due, (next_start, started, session))
                started += 1
                next_start += random.expovariate(sessions_per_s)
            now, number, session = heapq.heappop(due)
            line = session.turn(now)
            if line is None:
                continue
            yield line
            written += 1
            if session.turns_left:
                heapq.heappush(due, (now + session.seconds_to_next(), number, session))

    def _make_system_prompts(self, kind: Kind, ids: Iterator[int]) -> list[list[int]]:
        stretches = self._system_stretches(kind)
        return [[next(ids) for _ in range(stretches)] for _ in range(self.system_prompts)]

    def _system_stretches(self, kind: Kind) -> int:
        return round(self.system_tokens * kind.system_factor / self.hash_tokens)


class _Session:
    """A session: one user with one growing text."""

    __slots__ = (
        "_hash_ids",
        "_ids",
        "_kind",
        "_last_output",
        "_length",
        "_random",
        "_system_length",
        "_workload",
        "turns_left",
    )

    def __init__(
        self, kind: Kind, system: list[int], workload: Workload, random: Random, ids: Iterator[int]
    ) -> None:
        self._kind = kind
        self._workload = workload
        self._random = random
        self._ids = ids
        self._hash_ids = list(system)
        self._system_length = self._length = len(system) * workload.hash_tokens
        self._last_output = 0
        self.turns_left = 1
        while random.random() >= 1 / kind.turns:
            self.turns_left += 1

    def turn(self, now: float) -> str | None:
        """Returns the request of the next turn; ``None``: it is too long, and the session ends."""
        kind = self._kind
        first = self._length == self._system_length
        added = self._tokens(kind.first_tokens if first else kind.input_tokens)
        output = self._tokens(kind.output_tokens)
        most = self._workload.max_tokens
        if first:  # a session has at least one turn
            added = min(added, most - self._length - 1)
            output = min(output, most - self._length - added)
        prompt = self._length + added
        if prompt + output > most:
            self.turns_left = 0
            return None
        self.turns_left -= 1
        size, hash_ids = self._workload.hash_tokens, self._hash_ids
        # A stretch keeps its id while it fills up, over several turns.
        for _ in range(len(hash_ids), -(-(prompt + output) // size)):
            hash_ids.append(next(self._ids))
        self._length, self._last_output = prompt + output, output
        in_prompt = -(-prompt // size)
        return (
            f'{{"timestamp": {round(now * 1000)}, "input_length": {prompt}, '
            f'"output_length": {output}, "hash_ids": {hash_ids[:in_prompt]}, '
            f'"output_hash_ids": {hash_ids[in_prompt:]}, "system_length": {self._system_length}}}\n'
        )

    def seconds_to_next(self) -> float:
        """Returns the seconds from the last turn to the next one."""
        pause = self._random.expovariate(1 / self._kind.pause_s)
        return self._last_output / _ANSWER_TOKENS_PER_S + pause

    def _tokens(self, median: float) -> int:
        return max(1, round(self._random.lognormvariate(math.log(median), self._kind.spread)))
