"""Loads that fail, through the whole engine: they cost time and are never seen in the output."""

from __future__ import annotations

import threading

import pytest
import rank_connectors
import torch
from observed import check_idle, slow, tokens

from kvconnect import KvCacheConnectorConfig, SamplingParams
from kvconnect.connector.data import Direction, TransferFailure

T = 16
GREEDY = SamplingParams(max_tokens=20)


class Plan:
    """What the connector does with every request whose prompt has 70 tokens."""

    is_async = False
    good_blocks = 0  # loaded as they were; of those behind them the bytes are garbage
    bad_blocks = 3
    writes_ended = True
    fails = True

    def __init__(self) -> None:
        self.stored: dict[bytes, torch.Tensor] = {}
        self.pool = torch.empty(0)
        self.loads = 0
        self.unreturned: list[int] = []
        self.hold = threading.Event()  # loads in the background end once it is set
        self.wakeup = lambda: None

    @property
    def num_tokens(self) -> int:
        return (self.good_blocks + self.bad_blocks) * T


PLAN = Plan()


class Leader(rank_connectors.Scheduler):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if request.prompt_len != 70 or num_computed_tokens or PLAN.loads or not PLAN.stored:
            return 0, False
        PLAN.loads += 1
        return PLAN.num_tokens, PLAN.is_async

    def build_connector_meta(self, scheduler_output):
        data = [*scheduler_output.loading_requests, *scheduler_output.new_requests]
        return [(one.request_id, one.new_block_ids, one.block_keys) for one in data]

    def request_finished(self, request, cache_block_ids):
        computed = (request.num_tokens - 1) // T
        for key, block in zip(request.block_keys(0, computed), cache_block_ids, strict=False):
            PLAN.stored.setdefault(key, PLAN.pool[block].clone())
        return False


class Worker(rank_connectors.Worker):
    wakes = True

    def __init__(self, llm_args):
        super().__init__(llm_args)
        self.loading: dict[int, list[int]] = {}
        self.started: set[int] = set()

    def register_kv_caches(self, kv_cache_tensor):
        PLAN.pool = kv_cache_tensor

    def set_wakeup(self, wakeup):
        PLAN.wakeup = wakeup

    def start_load_kv(self, stream):
        for request_id, block_ids, keys in self.get_connector_meta():
            if PLAN.loads == 1 and len(keys) == 4 and not self.started:
                self.started.add(request_id)
                blocks = block_ids[: PLAN.good_blocks + PLAN.bad_blocks]
                for index, block in enumerate(blocks):
                    good = index < PLAN.good_blocks or not PLAN.fails
                    PLAN.pool[block] = PLAN.stored[keys[index]] if good else torch.nan
                self.loading[request_id] = blocks

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        ended = PLAN.unreturned if PLAN.hold.is_set() else []
        PLAN.unreturned = [] if PLAN.hold.is_set() else PLAN.unreturned
        if PLAN.is_async and not PLAN.fails and PLAN.hold.is_set():
            ended = [*ended, *self.loading]
            self.loading.clear()
        return [], ended

    def get_failed(self):
        if not PLAN.fails or (PLAN.is_async and not PLAN.hold.is_set() and PLAN.writes_ended):
            return []
        failures = [
            TransferFailure(
                request_id,
                Direction.LOAD,
                num_valid_tokens=PLAN.good_blocks * T,
                reason="planted",
                writes_ended=PLAN.writes_ended,
            )
            for request_id in self.loading
        ]
        if not PLAN.writes_ended:
            PLAN.unreturned = list(self.loading)
        self.loading.clear()
        return failures


@pytest.fixture
def plan():
    global PLAN  # noqa: PLW0603
    PLAN = Plan()
    return PLAN


@pytest.fixture
def llm(plan, open_llm, llama, prompts, tmp_path):
    """An engine that has everything in its store and nothing on its device."""
    connector = KvCacheConnectorConfig(
        connector_module=__name__,
        connector_scheduler_class=Leader.__name__,
        connector_worker_class=Worker.__name__,
        max_quarantined_fraction=1.0,
    )
    llm = open_llm(llama, connector=connector, max_num_tokens=48)
    llm.generate(prompts, GREEDY)
    llm._engine._kv.blocks.reset()
    return llm


@pytest.fixture
def expected(reference, llama, prompts):
    return reference(llama, prompts, 20)


def answers(llm, prompts):
    return tokens(llm.generate(prompts, GREEDY))


@pytest.mark.parametrize(
    ("is_async", "good_blocks", "writes_ended"),
    [
        # Every two of the three meet in the first half.
        *[(False, 0, True), (False, 2, False), (True, 0, False), (True, 2, True)],
        *slow((False, 0, False), (False, 2, True), (True, 0, True), (True, 2, False)),
    ],
)
def test_the_rest_is_computed(is_async, good_blocks, writes_ended, plan, llm, prompts, expected):
    plan.is_async, plan.good_blocks, plan.writes_ended = is_async, good_blocks, writes_ended
    plan.bad_blocks = 4 - good_blocks
    plan.hold.set()
    outputs = llm.generate(prompts, GREEDY)
    assert plan.loads == 1
    assert tokens(outputs) == expected
    # What was valid counts as reused; nothing else of the load does.
    assert outputs[0].reused_store_tokens == good_blocks * T
    assert outputs[0].computed_tokens == 70 - good_blocks * T
    # Nothing of the failed step is in the tree.
    assert answers(llm, prompts) == expected
    check_idle(llm)


def test_without_a_failure_it_is_all_reused(plan, llm, prompts, expected):
    plan.fails = False
    outputs = llm.generate(prompts, GREEDY)
    assert tokens(outputs) == expected
    assert (outputs[0].reused_store_tokens, outputs[0].computed_tokens) == (48, 22)


def test_a_stream_sees_nothing_of_a_failed_step(plan, llm, prompts, expected):
    chunks = list(llm.stream(prompts[0], GREEDY))
    assert plan.loads == 1
    assert [token for chunk in chunks for token in chunk.token_ids] == expected[0]


def test_others_go_on_while_one_loads(plan, llm, prompts, expected):
    plan.is_async, plan.fails = True, False
    # All of them wait when the engine looks, and the first one is longer than a step's budget.
    gate, step = threading.Event(), llm._engine.step
    llm._engine.step = lambda: gate.wait(60) and step()
    llm.submit([1], SamplingParams(max_tokens=1))
    loading, *others = [llm.submit(prompt, GREEDY) for prompt in prompts]
    gate.set()
    assert [list(one.result(timeout=60).output_token_ids) for one in others] == expected[1:]
    assert plan.loads == 1
    assert not loading.done
    assert llm.stats().loading_requests == 1
    plan.hold.set()
    plan.wakeup()
    output = loading.result(timeout=60)
    assert list(output.output_token_ids) == expected[0]
    assert output.reused_store_tokens == 48


def test_an_engine_that_only_loads_sleeps_until_it_is_woken(plan, llm, prompts, expected):
    plan.is_async, plan.fails = True, False
    steps = []
    step = llm._engine.step
    llm._engine.step = lambda: steps.append(True) or step()
    loading = llm.submit(prompts[0], GREEDY)
    with pytest.raises(TimeoutError):
        loading.result(timeout=0.3)
    assert len(steps) < 6  # no polling
    plan.hold.set()
    plan.wakeup()
    assert list(loading.result(timeout=60).output_token_ids) == expected[0]


def test_aborting_while_it_loads(plan, llm, prompts, expected):
    plan.is_async, plan.fails = True, False
    loading = llm.submit(prompts[0], GREEDY)
    llm.generate(prompts[1], GREEDY)
    loading.abort()
    assert loading.result(timeout=60).finish_reason == "abort"
    plan.hold.set()
    plan.wakeup()
    assert answers(llm, prompts) == expected
    check_idle(llm)


def test_blocks_that_come_back_when_nobody_hopes_for_them_are_used(plan, llm, prompts, monkeypatch):
    blocks = llm._engine._kv.blocks
    blocks.add_sequence(10**6, [1] * T * (blocks.max_blocks() - 32))
    plan.is_async, plan.fails = True, False
    loading = llm.submit(prompts[0], GREEDY)
    llm.generate(prompts[1], GREEDY)
    loading.abort()
    assert loading.result(timeout=60).finish_reason == "abort"
    llm.generate(prompts[1], GREEDY)
    ledger = llm._engine._connector._ledger
    assert ledger.quarantine.num_blocks == 5
    monkeypatch.setattr(ledger, "next_deadline", lambda: None)
    plan.hold.set()
    # It needs all 32 blocks that are left, and no step of another request comes before it.
    long = SamplingParams(max_tokens=T, ignore_eos=True)
    assert llm.generate([2] * (31 * T), long)[0].finish_reason == "length"
