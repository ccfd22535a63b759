"""Measures the time to the first token at stores of every speed, against computing.

Three engines take turns on the same prompts: one computes, one waits for its loads, and one
computes the beginning of a prompt while its end is loaded. The store's rate is a multiple of the
rate at which the machine computes keys and values, measured first.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from torch import Tensor

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.bench.report import Figure
from kvconnect.bench.workload import random_prompt
from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.keys import BlockKey
from kvconnect.tokens import TokenArray
from kvconnect_bench.crossover.bucket_store import BucketStore
from kvconnect_bench.crossover.plan import Cell, Crossover, CrossoverPlan

Tell = Callable[[str], None]

_ONE = SamplingParams(max_tokens=1, ignore_eos=True)
_FAST = float("inf")
_WARM = 2  # rounds that are not counted: the engine gets to know the store
_IDLE_S = 0.05  # before each prompt: a processor that has just computed is faster


class _Bench:
    """The three engines on one model, and the stores of two of them."""

    def __init__(self, model: Path, plan: CrossoverPlan, stack: ExitStack) -> None:
        self._plan = plan
        frames: dict[BlockKey, Tensor] = {}
        self.stores = [BucketStore(frames) for _ in range(2)]
        longest = max(*plan.prompts, plan.users_prompt * max(plan.users), plan.prefix_tokens + 8192)
        cache = KvCacheConfig(tokens_per_block=32, max_tokens=2 * longest)

        def engine(store: BucketStore | None, *, overlap: bool) -> LLM:
            connector = None
            if store is not None:
                connector = KvCacheConnectorConfig(
                    backend=store, overlap_loads=overlap, lookup_timeout_ms=5000, load_timeout_s=600
                )
            return LLM(
                model,
                kv_cache=cache,
                connector=connector,
                max_num_tokens=plan.max_num_tokens,
                max_batch_size=64,
            )

        self.plain = stack.enter_context(engine(None, overlap=False))
        self.waiting = stack.enter_context(engine(self.stores[0], overlap=False))
        self.ours = self.plain
        self._ours = stack.enter_context(ExitStack())
        self._engine = engine
        self.token_nbytes = self.plain.layout.block_nbytes / self.plain.layout.tokens_per_block
        gc.freeze()  # else a collection scans all of torch, for a quarter of a second
        stack.callback(gc.unfreeze)

    def meet_store(self) -> None:
        """Starts our engine anew: it knows neither the model's pace nor the store's."""
        self._ours.close()
        self.ours = self._ours.enter_context(self._engine(self.stores[1], overlap=True))

    def set_rate(self, bytes_per_s: float, first_byte_s: float) -> None:
        for store in self.stores:
            store.bytes_per_s, store.first_byte_s = bytes_per_s, first_byte_s

    def fill(self, prompts: Sequence[TokenArray]) -> None:
        """Stores `prompts`, whose beginnings the store has not yet."""
        self.set_rate(_FAST, 0.0)
        for prompt in prompts:
            self._first_token(self.waiting, [prompt])
        self._reset(self.waiting)

    def seconds(self, llm: LLM, prompts: Sequence[TokenArray]) -> float:
        """Returns the mean time to the first token of `prompts` at once, on an idle machine.

        The device is empty.
        """
        self._reset(llm)
        time.sleep(_IDLE_S)
        return self._first_token(llm, prompts)

    def _reset(self, llm: LLM) -> None:
        while any(store.running for store in self.stores) or not llm.reset_prefix_cache():
            time.sleep(0.001)

    @staticmethod
    def _first_token(llm: LLM, prompts: Sequence[TokenArray]) -> float:
        outputs = llm.generate(list(prompts), _ONE)
        return statistics.mean(one.ttft_ms or 0.0 for one in outputs) / 1e3

    def in_turns(self, prompts: Sequence[TokenArray]) -> tuple[float, float, float]:
        """Returns the medians of all three engines, after rounds that are not counted."""
        engines = (self.plain, self.waiting, self.ours)
        rounds = [
            [self.seconds(llm, prompts) for llm in engines]
            for _ in range(_WARM + self._plan.repeats)
        ]
        computed, loaded, ours = map(statistics.median, zip(*rounds[_WARM:], strict=True))
        return computed, loaded, ours

    def between_tokens(self, llm: LLM, prompt: TokenArray, running: TokenArray) -> float:
        """Returns the mean seconds between tokens of `running` while `prompt` comes."""
        self._reset(llm)
        stream = llm.submit(running, SamplingParams(max_tokens=4096, ignore_eos=True))
        times: list[float] = []
        first = until = 0.0
        handle = None
        for chunk in stream.stream():
            times.append(time.perf_counter())
            if len(times) == 20:
                first = times[-1]
                handle = llm.submit(prompt, _ONE)
            if handle is not None and handle.done:
                until = times[-1]
                break
            del chunk
        stream.abort()
        gaps = [b - a for a, b in pairwise(times) if first <= a and b <= until]
        return statistics.mean(gaps)


def crossover(model: Path | None, scratch: Path, plan: CrossoverPlan, tell: Tell) -> Crossover:
    """Measures all cells of `plan`. Blocks for many minutes.

    Args:
        model: directory; default: a random Llama that computes some 20,000 tokens in a second.
        scratch: an empty directory.
        plan: what to measure.
        tell: called with a sentence about each step.
    """
    if model is None:
        model = scratch / "model"
        make_model(
            model,
            "llama",
            hidden_size=256,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            intermediate_size=512,
            max_position_embeddings=65_536,
        )
    with ExitStack() as stack:
        bench = _Bench(model, plan, stack)
        cells = tuple(_cells(bench, plan, tell))
        tell("a request that runs beside a load")
        between = _between(bench, plan)
        shared = None
        if plan.prefix_users:
            tell(f"{plan.prefix_users} users of one prefix")
            shared = _shared(bench, plan)
    return Crossover(cells, shared, between)


def _cells(bench: _Bench, plan: CrossoverPlan, tell: Tell) -> Iterator[Cell]:
    for number, (prompt, users) in enumerate(_sizes(plan)):
        prompts = [random_prompt(prompt, seed=1000 * number + user) for user in range(users)]
        bench.fill(prompts)
        # Alone: what the store's rate is a multiple of.
        computed = statistics.median(bench.seconds(bench.plain, prompts[:1]) for _ in range(3))
        own_rate = prompt * bench.token_nbytes / computed
        for first_byte_ms in plan.first_byte_ms:
            for rate in plan.rates:
                bench.set_rate(rate * own_rate, first_byte_ms / 1e3)
                bench.meet_store()
                cell = Cell(rate, first_byte_ms, prompt, users, *bench.in_turns(prompts))
                tell(
                    f"{prompt} tokens, {users} users, rate {rate:g}, {first_byte_ms:g} ms: "
                    f"computed {cell.computed:.3f}, loaded {cell.loaded:.3f}, "
                    f"ours {cell.ours:.3f} s ({cell.ratio:.2f})"
                )
                yield cell


def _sizes(plan: CrossoverPlan) -> Iterator[tuple[int, int]]:
    for prompt in plan.prompts:
        yield prompt, 1
    for users in plan.users:
        if users > 1:
            yield plan.users_prompt, users


def _between(bench: _Bench, plan: CrossoverPlan) -> tuple[float, float]:
    prompt, running = random_prompt(plan.users_prompt, 7), random_prompt(64, 8)
    bench.fill([prompt])
    computed = bench.seconds(bench.plain, [prompt])
    bench.set_rate(4 * plan.users_prompt * bench.token_nbytes / computed, 0.0)
    bench.meet_store()
    waiting, ours = [], []
    for _ in range(1 + plan.repeats):
        waiting.append(bench.between_tokens(bench.waiting, prompt, running))
        ours.append(bench.between_tokens(bench.ours, prompt, running))
    return statistics.median(waiting[1:]), statistics.median(ours[1:])


def _shared(bench: _Bench, plan: CrossoverPlan) -> tuple[float, float]:
    prefix = random_prompt(plan.prefix_tokens, 9)
    bench.fill([prefix])
    prompts = [
        [*prefix.tolist(), *random_prompt(64, 10 + user).tolist()]
        for user in range(plan.prefix_users)
    ]
    computed = bench.seconds(bench.plain, [prefix])
    bench.set_rate(plan.prefix_tokens * bench.token_nbytes / computed, 0.0)
    bench.meet_store()
    rounds = [
        (bench.seconds(bench.plain, prompts), bench.seconds(bench.ours, prompts))  # type: ignore[arg-type]
        for _ in range(_WARM + plan.repeats)
    ]
    without, ours = map(statistics.median, zip(*rounds[_WARM:], strict=True))
    return without, ours


def figures_of(measured: Crossover) -> list[Figure]:
    """Returns the figures of `measured`, with their targets."""
    figures = []
    for cell in measured.cells:
        name = (
            f"{cell.prompt} tokens, {cell.users} users, {cell.first_byte_ms:g} ms, "
            f"store / model {cell.rate:g}"
        )
        target = "<= 0.65" if cell.is_close and cell.users == 1 else "<= 1.05"
        figures += [
            Figure(f"{name}: computed", cell.computed * 1e3, "ms"),
            Figure(f"{name}: loaded", cell.loaded * 1e3, "ms"),
            Figure(f"{name}: ours", cell.ours * 1e3, "ms"),
            Figure(f"{name}: ours / the better one", cell.ratio, "", target),
        ]
    waiting, beside = measured.between
    figures.append(
        Figure("between tokens of others: ours / loaded", beside / waiting, "", "<= 1.05")
    )
    if measured.shared is not None:
        without, ours = measured.shared
        figures.append(Figure("users of one prefix: ours / computed", ours / without, "", "<= 1.1"))
    return figures
