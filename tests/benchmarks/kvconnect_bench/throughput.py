"""Measures one request, many at once and a long prompt, also with vLLM's engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvconnect import LLM, KvCacheConfig, SamplingParams
from kvconnect.bench.report import Figure, median_ratio
from kvconnect.bench.workload import random_prompt
from kvconnect_bench.blocks.party import Party
from kvconnect_bench.peer_python import require_peer_python

_PEER = "kvconnect_bench.peers.vllm_engine"


@dataclass(frozen=True, slots=True)
class ThroughputPlan:
    """The settings of a run.

    Attributes:
        requests: at once, against one.
        prompt_tokens, max_tokens: of each of them.
        prefill_tokens: of the long prompt, which gets one token of answer.
        repeats: rounds; each engine has its turn in every one.
    """

    requests: int
    prompt_tokens: int
    max_tokens: int
    prefill_tokens: int
    repeats: int

    @property
    def longest(self) -> int:
        """The tokens of the longest request."""
        return max(self.prompt_tokens + self.max_tokens, self.prefill_tokens + 1)


class _Answer(Protocol):
    """Answers `prompts` at once; returns the seconds that took, and the tokens of each."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> tuple[float, list[list[int]]]: ...


@dataclass(frozen=True, slots=True)
class _Round:
    """The results of one engine in one round: tokens per second, and the tokens themselves."""

    one: float
    many: float
    prefill: float
    tokens: list[list[int]]


def throughput(model: Path, plan: ThroughputPlan, peer_python: Path | None) -> list[Figure]:
    """Measures tokens per second, without reuse; medians of rounds with engines in turn.

    Blocks for minutes.

    Args:
        model: directory; computed with in float32.
        plan: the settings of the run.
        peer_python: an interpreter that has vLLM; ``None``: kvconnect alone.

    Raises:
        ConfigurationError: there is no such interpreter, or this is no checkout.
        PartyFailed: vLLM is not there, or its process ended.
    """
    if peer_python is not None:
        require_peer_python(peer_python)
    with ExitStack() as stack:
        engines: dict[str, _Answer] = {"": stack.enter_context(_own(model, plan))}
        if peer_python is not None:
            name, answer = stack.enter_context(_peer(peer_python, model, plan))
            engines[name] = answer
        for answer in engines.values():
            _round(answer, plan)  # does not count
        rounds = [
            {name: _round(answer, plan) for name, answer in engines.items()}
            for _ in range(plan.repeats)
        ]
    return _figures(plan, rounds)


@contextmanager
def _own(model: Path, plan: ThroughputPlan) -> Iterator[_Answer]:
    room = (plan.requests + 1) * (plan.prompt_tokens + plan.max_tokens + 64) + plan.longest
    cache = KvCacheConfig(enable_block_reuse=False, max_tokens=room)
    with LLM(model, kv_cache=cache, dtype="float32") as llm:

        def answer(
            prompts: Sequence[Sequence[int]], max_tokens: int
        ) -> tuple[float, list[list[int]]]:
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds = time.perf_counter() - start
            return seconds, [list(output.output_token_ids) for output in outputs]

        yield answer


@contextmanager
def _peer(python: Path, model: Path, plan: ThroughputPlan) -> Iterator[tuple[str, _Answer]]:
    with Party(python, _PEER) as party:
        party.ask("start", model=str(model), longest=plan.longest)

        def answer(
            prompts: Sequence[Sequence[int]], max_tokens: int
        ) -> tuple[float, list[list[int]]]:
            said = party.ask("generate", prompts=list(map(list, prompts)), max_tokens=max_tokens)
            return said["seconds"], said["tokens"]

        yield f"vLLM {party.versions['version']}", answer


def _round(answer: _Answer, plan: ThroughputPlan) -> _Round:
    prompts = [random_prompt(plan.prompt_tokens, seed).tolist() for seed in range(plan.requests)]
    alone, first = answer(prompts[:1], plan.max_tokens)
    together, others = answer(prompts, plan.max_tokens)
    waited, last = answer([random_prompt(plan.prefill_tokens, plan.requests).tolist()], 1)
    return _Round(
        one=plan.max_tokens / alone,
        many=plan.requests * plan.max_tokens / together,
        prefill=plan.prefill_tokens / waited,
        tokens=first + others + last,
    )


def _figures(plan: ThroughputPlan, rounds: Sequence[dict[str, _Round]]) -> list[Figure]:
    titles = {
        "one": "one request",
        "many": f"{plan.requests} requests at once",
        "prefill": f"prefill of {plan.prefill_tokens:,} tokens",
    }
    median = statistics.median
    peers = [name for name in rounds[0] if name]
    figures = []
    for field, title in titles.items():
        own = [getattr(one[""], field) for one in rounds]
        figures.append(Figure(title, median(own), "tokens/s"))
        for peer in peers:
            other = [getattr(one[peer], field) for one in rounds]
            ratio = median_ratio(own, other)
            figures.append(Figure(f"{title}: {peer}", median(other), "tokens/s"))
            figures.append(Figure(f"{title}: kvconnect / {peer}", ratio, "x", ">= 0.95"))
    ratio = median(one[""].many / one[""].one for one in rounds)
    target = ">= 3" if plan.requests == 16 else ""
    figures.append(Figure("ratio", ratio, "x", target))
    for peer in peers:
        pairs = zip(rounds[0][""].tokens, rounds[0][peer].tokens, strict=True)
        same = [mine == theirs for mine, theirs in pairs]
        figures.append(Figure(f"answers equal to {peer}'s", 100 * sum(same) / len(same), "%"))
    return figures
