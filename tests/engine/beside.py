"""Stores, engines and prompts of tests that compute beside a load."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from late_store import LateStore
from observed import check_idle, slow, words

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, RequestOutput, SamplingParams
from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.connector.io.load import Load, Loads
from kvconnect.connector.io.window_search import blocks_needed
from kvconnect.engine.beside_loads import BesideLoads
from kvconnect.engine.request.handle import RequestHandle
from kvconnect.engine.sampling.drafts import NgramSpeculation
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest

T = 8
GREEDY = SamplingParams(max_tokens=12)


KINDS = ["llama", "mixed", "qwen3_next"]
"""Models with full attention, with windows in some layers, with recurrent states in some."""
ALL = [*KINDS, *slow("mistral", "gpt_oss", "lfm2", "falcon_h1")]
ANY = [*ALL, *slow("mamba2")]  # without attention


def cache(**more: object) -> KvCacheConfig:
    """With a snapshot of recurrent states every four blocks, where there are some."""
    given = {"tokens_per_block": T, "max_tokens": 1024, "state_interval": 4 * T}
    return KvCacheConfig(**given | more)


PROMPT = words(12 * T + 5, 0)
FEW_SHARED = [*PROMPT[: 3 * T], *words(5 * T, 1)]
MANY_SHARED = [*PROMPT[: 8 * T + 3], *words(20, 2)]
PROMPTS = [PROMPT, FEW_SHARED, MANY_SHARED, words(40, 3), words(9 * T, 4)]


def whole_blocks(request: LlmRequest, budget: int) -> int:
    """All that the budget has room for, in whole blocks, up to what is loaded."""
    left = request.loaded_from - request.num_computed_tokens
    return max(0, left if left <= budget else budget - budget % T)


def nothing(_request: LlmRequest, _budget: int) -> int:
    return 0


class Beside:
    """Decides what is computed beside loads, as a test says, and knows what they have copied."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.decide: Callable[[LlmRequest, int], int] = whole_blocks
        self.asked = 0
        self._copied = threading.Condition()
        copy_now = Loads._copy_now

        def copy_and_notify(*args: object) -> None:
            copy_now(*args)
            with self._copied:
                self._copied.notify_all()

        patch.setattr(Loads, "_copy_now", copy_and_notify)
        patch.setattr(BesideLoads, "is_worth", lambda *_: True)
        patch.setattr(
            BesideLoads, "chunk", lambda _, request, budget, **__: self._chunk(request, budget)
        )

    def _chunk(self, request: LlmRequest, budget: int) -> int:
        self.asked += 1
        return self.decide(request, budget)

    def wait(self, load: Load, number: int) -> None:
        """Returns once all blocks of `load` from `number` on are in the pool."""
        with self._copied:
            num_blocks = load.order.num_from(number)
            assert self._copied.wait_for(lambda: load.num_valid_blocks() >= num_blocks, 60)

    def after(self, llm: LLM, met: int) -> Callable[[LlmRequest, int], int]:
        """Decides to compute once all from token `met` on is loaded, and the engine knows it."""

        def decide(request: LlmRequest, budget: int) -> int:
            load = loads(llm)._overlapping.get(request.request_id)
            if load is None:
                return 0  # it has ended, which the engine is about to see
            self.wait(load, -(-met // T))
            if request.loaded_from > met:
                llm._thread._inbox.ring()
                return 0
            return whole_blocks(request, budget)

        return decide


def worker(llm: LLM):
    return llm._engine._connector._worker


def loads(llm: LLM) -> Loads:
    return worker(llm)._loads


def connector(store: LateStore) -> KvCacheConnectorConfig:
    # What waits for a load's deadline hangs.
    return KvCacheConnectorConfig(
        backend=store, lookup_timeout_ms=60_000, load_timeout_s=600, overlap_loads=True
    )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def check_nothing_is_left(llm: LLM, store: LateStore) -> None:
    """Once the store has answered, no request has left a block, a slot or a record."""
    store.release()
    staging = worker(llm)._access.staging
    until(lambda: staging.num_free == staging.num_slots)
    until(llm.reset_prefix_cache)
    check_idle(llm)
    until(lambda: not loads(llm)._overlapping)
    connector = llm._engine._connector
    assert not connector._scheduler._overlapping
    assert not connector._scheduler._plans
    assert not connector._records
    assert not connector._ledger.quarantine
    assert not llm._scheduler.beside_loads._running


def check(output: RequestOutput, expected: list[int], reused: int | None = None) -> None:
    """It has these tokens; `reused` of its prompt's came from the store, the rest was computed."""
    assert list(output.output_token_ids) == expected
    if reused is not None:
        assert output.reused_store_tokens == reused
    others = output.reused_store_tokens + output.reused_device_tokens
    assert output.computed_tokens == output.prompt_tokens - others


def send_back_once(llm: LLM, when: Callable[[LlmRequest], bool]) -> list[LlmRequest]:
    """Preempts a request right after the first step after which `when` holds for it."""
    engine, sent = llm._engine, []
    step = engine.step

    def step_and_send_back() -> bool:
        worked = step()
        scheduler = engine._scheduler
        for request in [*scheduler.running, *scheduler.loading.values()]:
            if not sent and when(request):
                sent.append(request)
                engine._send_back(request)
                return True
        return worked

    engine.step = step_and_send_back
    return sent


def crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on there is no room to begin computing beside a load."""
    monkeypatch.setattr(
        KVCacheManager,
        "needed_beside",
        lambda self, request: (
            (0 if self.blocks.has_begun(request.request_id) else 10**6,) * len(self.layouts)
        ),
    )


def stop_at(num_tokens: int, reached: threading.Event) -> Callable[[LlmRequest, int], int]:
    """Decides to compute so many tokens, block by block, and then nothing."""

    def decide(request: LlmRequest, _budget: int) -> int:
        if request.num_computed_tokens < num_tokens:
            return T
        reached.set()
        return 0

    return decide


class Late:
    """Engines on a model that read block by block from a store that has PROMPTS, and is late.

    Attributes:
        store: it, which keeps nothing that is saved.
        llm: the engine that was opened last.
        beside: decides what is computed beside loads.
    """

    def __init__(
        self,
        model: Path,
        saved: LateStore,
        open_llm: Callable[..., LLM],
        reference: Callable[..., list[list[int]]],
    ) -> None:
        self.model, self.saved, self.store = model, saved, LateStore()
        self._open_llm, self.reference = open_llm, reference
        self.store.become(saved)
        self.store.writable = False

    def open(self, **how: object) -> LLM:
        """Opens an engine, which computes at most three blocks in a step by default."""
        config = cache(**how.pop("cache", {}))
        given = {"max_num_tokens": 3 * T + 5, "connector": connector(self.store)} | how
        self.llm = self._open_llm(self.model, kv_cache=config, **given)
        worker(self.llm)._access.call_blocks = 1
        return self.llm

    @property
    def keys(self) -> list[set[BlockKey]]:
        """The keys of each block of PROMPT."""
        return self.store.keys_at(PROMPT)

    @property
    def end(self) -> int:
        """How many tokens of PROMPT are in the store: up to a state there is no tail."""
        return 12 * T if any(one.states for one in self.llm.layouts) else len(PROMPT) - 1

    def needs(self, layout: KvCacheLayout, number: int, end: int) -> bool:
        """Whether computing from `end` on reads block `number` of a group, or a later one."""
        return not layout.only_counts and number >= blocks_needed(layout.window, end, T).start

    def met(self, number: int, end: int | None = None) -> int:
        """The token from which on all is loaded, once every block from `number` on is there."""
        end = self.end if end is None else end
        is_later = any(self.needs(layout, number - 1, end) for layout in self.llm.layouts)
        return min(end, number * T) if is_later else 0

    def hold(self, number: int) -> None:
        """The blocks before `number` do not come."""
        self.store.held = set().union(*self.keys[:number])

    def meet(self, number: int, end: int | None = None) -> int:
        """All from `number` on comes, then the tokens before are computed. Returns how many."""
        self.hold(number)
        met = self.met(number, end)
        self.beside.decide = self.beside.after(self.llm, met)
        return met

    def once_the_store_waits(self, request: LlmRequest, budget: int) -> int:
        """Decides to compute all, once a load hangs."""
        assert self.store.waits.wait(60)
        return whole_blocks(request, budget)

    def submit(self, prompt: list[int] = PROMPT) -> RequestHandle:
        return self.llm.submit(prompt, GREEDY)

    def ask(
        self, prompt: list[int] = PROMPT, *, reused: int | None = None, max_tokens: int = 12
    ) -> RequestOutput:
        """Checks the answer, and that nothing is left of the request."""
        output = self.llm.generate(prompt, SamplingParams(max_tokens=max_tokens))[0]
        self.check(output, prompt, reused=reused, max_tokens=max_tokens)
        self.check_rest()
        return output

    def check(
        self,
        output: RequestOutput,
        prompt: list[int] = PROMPT,
        *,
        reused: int | None = None,
        max_tokens: int = 12,
    ) -> None:
        (expected,) = self.reference(self.model, [prompt], 12)
        check(output, expected[:max_tokens], reused)

    def check_tokens(self, output: RequestOutput) -> None:
        """That of PROMPT; it was preempted, so some of its tokens were computed twice."""
        assert [list(output.output_token_ids)] == self.reference(self.model, [PROMPT], 12)

    def check_rest(self) -> None:
        check_nothing_is_left(self.llm, self.store)


STORMY = {
    "roomy": {"max_num_tokens": 5 * T},
    "crowded": {
        "max_num_tokens": 2 * T,
        "scheduling": "max_utilization",
        "speculative": NgramSpeculation(num_draft_tokens=3, min_ngram_size=1),
    },
}


class Storm:
    """An engine and a store; what happens to them follows from a seed, but for what is in time."""

    def __init__(self, llm: LLM, store: LateStore, beside: Beside) -> None:
        self.llm, self.store = llm, store
        self.random = random.Random(0)
        self.disturbed: set[int] = set()
        self.is_over = True
        beside.decide = self.decide
        worker(llm)._access.call_blocks = 1
        self._step, llm._engine.step = llm._engine.step, self.step

    def decide(self, request: LlmRequest, budget: int) -> int:
        most = min(request.joins_load_at - request.num_computed_tokens, budget)
        if most > 0 and self.random.random() < 0.5:
            return self.random.choice([most, min(most, T), self.random.randint(1, most)])
        self.llm._thread._inbox.ring()
        return 0

    def step(self) -> bool:
        worked = self._step()
        engine, scheduler = self.llm._engine, self.llm._scheduler
        held = [*scheduler.running, *scheduler.loading.values()]
        if held and not self.is_over:
            match self.random.randrange(30):
                case 0:
                    chosen = self.random.choice(held)
                    self.disturbed.add(chosen.request_id)
                    engine._send_back(chosen)
                case 1:
                    chosen = self.random.choice([*held, *scheduler.waiting])
                    self.disturbed.add(chosen.request_id)
                    engine.abort(chosen.request_id)
                case 2:
                    self.store.release()
                case 3:
                    frames = list(self.store.frames)
                    self.store.held = self.store.held | set(self.random.sample(frames, 5))
            return True
        return worked

    def run(self, seed: int, saved: LateStore, expected: dict[int, list[int]]) -> None:
        self.random.seed(seed)
        self.store.become(saved)
        kinds = [set[bytes]() for _ in range(8)]
        for key in self.store.frames:
            self.random.choice(kinds).add(key)
        self.store.held, self.store.lost, self.store.broken, self.store.failing, *_ = kinds
        chosen = [self.random.randrange(len(PROMPTS)) for _ in range(self.random.randrange(1, 5))]
        self.disturbed.clear()
        self.is_over = False
        params = [SamplingParams(max_tokens=self.random.choice([0, 1, 12])) for _ in chosen]
        handles = [
            self.llm.submit(PROMPTS[which], one) for which, one in zip(chosen, params, strict=True)
        ]
        outputs = [handle.result(timeout=60) for handle in handles]
        self.is_over = True
        for which, one, output in zip(chosen, params, outputs, strict=True):
            wanted = expected[which][: one.max_tokens]
            got = list(output.output_token_ids)
            assert got == (wanted if output.finish_reason != "abort" else wanted[: len(got)])
            if output.request_id not in self.disturbed and not output.preemptions:
                check(output, wanted)
        check_nothing_is_left(self.llm, self.store)
