"""Stores, engines and prompts of tests that compute beside a load."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from late_store import LateStore
from observed import check_idle

from kvconnect import LLM, KvCacheConnectorConfig, RequestOutput, SamplingParams
from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.connector.io.load import Load, Loads
from kvconnect.engine.beside_loads import BesideLoads
from kvconnect.engine.sampling.drafts import NgramSpeculation
from kvconnect.request import LlmRequest

T = 8
GREEDY = SamplingParams(max_tokens=12)


def words(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


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
    """Decides what is computed beside loads, as a test says."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.decide: Callable[[LlmRequest, int], int] = whole_blocks
        self.asked = 0
        patch.setattr(BesideLoads, "is_worth", lambda *_: True)
        patch.setattr(
            BesideLoads, "chunk", lambda _, request, budget, **__: self._chunk(request, budget)
        )

    def _chunk(self, request: LlmRequest, budget: int) -> int:
        self.asked += 1
        return self.decide(request, budget)


class Arrivals:
    """What has come into the pool of the loads that run."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._news = threading.Condition()
        copy_now = Loads._copy_now

        def copy_and_notify(*args: object) -> None:
            copy_now(*args)
            with self._news:
                self._news.notify_all()

        patch.setattr(Loads, "_copy_now", copy_and_notify)

    def wait(self, load: Load, num_blocks: int) -> None:
        """Returns once the last `num_blocks` are there."""
        with self._news:
            assert self._news.wait_for(lambda: load.num_valid_blocks() >= num_blocks, 60)

    def after(self, llm: LLM, num_blocks: int) -> Callable[[LlmRequest, int], int]:
        """Decides to compute once the last `num_blocks` are there, and the engine knows it."""

        def decide(request: LlmRequest, budget: int) -> int:
            load = loads(llm)._overlapping.get(request.request_id)
            if load is None:
                return 0  # it has ended, which the engine is about to see
            self.wait(load, num_blocks)
            if request.loaded_from > load.order.loaded_from(num_blocks, T):
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


def stop_at(num_tokens: int, reached: threading.Event) -> Callable[[LlmRequest, int], int]:
    """Decides to compute so many tokens, block by block, and then nothing."""

    def decide(request: LlmRequest, _budget: int) -> int:
        if request.num_computed_tokens < num_tokens:
            return T
        reached.set()
        return 0

    return decide


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
