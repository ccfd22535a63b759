"""Measures what a store that dies costs the requests, and how soon it is used again.

An engine with a store and two without one get the same prompts in turn. The cost of the store is
how much later the first token comes with it. The second engine without a store is the control. All
answers must be equal.
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.bench.report import Figure
from kvconnect.bench.workload import random_prompt
from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.engine.request.output import RequestOutput
from kvconnect.tokens import TokenArray
from kvconnect.trace import Event, metrics
from kvconnect_bench.servers.mortal import SERVERS, Death, MortalServer
from kvconnect_bench.servers.plain_s3 import any_credentials

Tell = Callable[[str], None]

_FEW = SamplingParams(max_tokens=2, ignore_eos=True)
_RECOVERY_S = 10.0
_PAUSE_S = 0.02  # between requests
_AGAIN_S = 0.1  # between attempts to hit


@dataclass(frozen=True, slots=True)
class DeadPlan:
    """The sizes and settings of the measurement.

    Attributes:
        prompt_tokens: of each request.
        requests: at least so many are measured after the breaker has opened.
        dead_s: the store is dead at least so long; pauses between probes grow meanwhile.
        budget_ms: the connector's ``lookup_timeout_ms``.
        timeout_s: the connector's deadline of loads and saves.
        parameters: further parameters of the store's URL.
        stored: prompts that are stored beforehand; each serves one attempt to hit.
    """

    prompt_tokens: int = 64
    requests: int = 200
    dead_s: float = 15.0
    budget_ms: float = 20.0
    timeout_s: float = 30.0
    parameters: str = ""
    stored: int = 200


@dataclass(frozen=True, slots=True)
class Toll:
    """The cost of one death of one store.

    Costs are the seconds by which a first token came later than without a store.

    Attributes:
        alive: cost of each request before the death; the store had none of their prompts.
        first: cost of the first request after the death.
        waiting: cost of each further request before the breaker opened.
        opened: cost of each request after that.
        control: `opened`, for a second engine without a store: the measurement's noise.
        until_open: from the death until the breaker opened.
        until_hit: from the recovery to the end of the first request that hit.
    """

    alive: tuple[float, ...]
    first: float
    waiting: tuple[float, ...]
    opened: tuple[float, ...]
    control: tuple[float, ...]
    until_open: float
    until_hit: float


def dead_stores(
    model: Path | None, scratch: Path, stores: Sequence[str], plan: DeadPlan, tell: Tell
) -> list[Figure]:
    """Measures every death of every store. Blocks for some minutes.

    Args:
        model: directory; default: a random Llama that answers in milliseconds, so that what a store
            costs shows.
        scratch: an empty directory.
        stores: names in `SERVERS`.
        plan: how to measure.
        tell: called with a sentence about each step.

    Raises:
        ConfigurationError: there is no redis-server here.
        RuntimeError: an answer was wrong, or a store was not used again.
    """
    figures: list[Figure] = []
    if model is None:
        model = scratch / "model"
        make_model(model, "llama", max_position_embeddings=8192)
    for name in stores:
        for death in Death:
            tell(f"{name}, {death.value}")
            with SERVERS[name](scratch / f"{name}-{death.value}") as server:
                toll = measure_death(model, server, death, plan)
            figures += figures_of(f"{name}, {death.value}", toll, plan.budget_ms)
    return figures


def measure_death(model: Path, server: MortalServer, death: Death, plan: DeadPlan) -> Toll:
    """Measures a death of `server` under an engine that uses it, and its recovery.

    Raises:
        RuntimeError: an answer was wrong, or the store was not used again.
    """
    with any_credentials(), ExitStack() as stack:
        trial = _Trial(model, server, plan, stack)
        return trial.run(death)


class _Trial:
    """An engine with the store and two without one, side by side."""

    def __init__(self, model: Path, server: MortalServer, plan: DeadPlan, stack: ExitStack) -> None:
        self._server = server
        self._plan = plan
        self._seed = 0
        cache = KvCacheConfig(max_tokens=8192)
        url = "&".join(part for part in (server.url, plan.parameters) if part)
        config = KvCacheConnectorConfig(
            url=url,
            lookup_timeout_ms=plan.budget_ms,
            overlap_loads=False,  # a store that is used again has loads, however fast the model is
            load_timeout_s=plan.timeout_s,
            save_timeout_s=plan.timeout_s,
        )
        self._plain = [stack.enter_context(LLM(model, kv_cache=cache)) for _ in range(2)]
        prompts = [self._fresh() for _ in range(plan.stored)]
        with LLM(model, kv_cache=cache, connector=config) as llm:
            self._stored = list(zip(prompts, llm.generate(prompts, _FEW), strict=True))
        self._llm = stack.enter_context(LLM(model, kv_cache=cache, connector=config))
        gc.freeze()  # else a collection scans all of torch, for a quarter of a second
        stack.callback(gc.unfreeze)
        self._opened = stack.enter_context(told_of("store.breaker.opened"))

    def run(self, death: Death) -> Toll:
        for _ in range(20):  # work that is done only the first time
            self._added()
        alive = tuple(self._added()[0] for _ in range(20))
        self._until_hit()  # on a busy machine an answer may come after the budget
        self._server.die(death)
        died = time.monotonic()
        first, _ = self._added()
        waiting = []
        while not self._opened.is_set():
            time.sleep(_PAUSE_S)
            waiting.append(self._added()[0])
        until_open = time.monotonic() - died
        then: list[tuple[float, float]] = []
        while len(then) < self._plan.requests or time.monotonic() - died < self._plan.dead_s:
            time.sleep(_PAUSE_S)
            then.append(self._added())
        self._server.recover()
        opened, control = zip(*then, strict=True)
        return Toll(alive, first, tuple(waiting), opened, control, until_open, self._until_hit())

    def _until_hit(self) -> float:
        recovered = time.monotonic()
        while not self._hits():
            time.sleep(_AGAIN_S)
        return time.monotonic() - recovered

    def _hits(self) -> bool:
        if not self._stored:
            raise RuntimeError(f"{self._server.url}: is not used again")
        prompt, before = self._stored.pop()
        output = self._ask(self._llm, prompt)
        self._check(output, before)
        return output.reused_store_tokens > 0

    def _fresh(self) -> TokenArray:
        self._seed += 1
        return random_prompt(self._plan.prompt_tokens, seed=self._seed)

    def _added(self) -> tuple[float, float]:
        """Returns by how many seconds the first token is later with the store, and in control."""
        prompt = self._fresh()
        engines = [self._llm, *self._plain]
        # In turns: the first one wakes the processor for the others.
        first = self._seed % len(engines)
        outputs: dict[int, RequestOutput] = {}
        for number in (*range(first, len(engines)), *range(first)):
            outputs[number] = self._ask(engines[number], prompt)
        self._check(outputs[0], outputs[1])
        found, control, plain = ((outputs[n].ttft_ms or 0.0) / 1e3 for n in range(len(engines)))
        return found - plain, control - plain

    def _check(self, output: RequestOutput, other: RequestOutput) -> None:
        if output.output_token_ids != other.output_token_ids:
            raise RuntimeError(f"{self._server.url}: another answer than without a store")

    @staticmethod
    def _ask(llm: LLM, prompt: TokenArray) -> RequestOutput:
        return llm.generate([prompt], _FEW)[0]


def figures_of(name: str, toll: Toll, budget_ms: float) -> list[Figure]:
    """Returns the figures of `toll`; `name` names the store and its death."""
    waiting = toll.waiting or (0.0,)
    return [
        Figure(f"{name}: a miss, before", statistics.median(toll.alive) * 1e3, "ms"),
        Figure(f"{name}: first request", toll.first * 1e3, "ms", f"<= {budget_ms:g} + a miss"),
        Figure(f"{name}: next ones, median", statistics.median(waiting) * 1e3, "ms"),
        Figure(f"{name}: next ones, worst", max(waiting) * 1e3, "ms"),
        Figure(f"{name}: until the breaker opens", toll.until_open, "s"),
        Figure(f"{name}: then, median", statistics.median(toll.opened) * 1e3, "ms", "< 1"),
        Figure(f"{name}: control, median", statistics.median(toll.control) * 1e3, "ms"),
        Figure(f"{name}: until a hit after recovery", toll.until_hit, "s", f"<= {_RECOVERY_S:g}"),
    ]


@contextmanager
def told_of(name: str) -> Iterator[threading.Event]:
    """Yields an event that is set when an event of this `name` is reported."""
    happened = threading.Event()

    def hear(event: Event) -> None:
        if event.name == name:
            happened.set()

    remove = metrics.add_hook(hear)
    try:
        yield happened
    finally:
        remove()
