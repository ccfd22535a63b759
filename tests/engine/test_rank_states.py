"""Recurrent models on several ranks, which divide mixers and states, and share snapshots."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from observed import check_idle, preempt, tokens
from parrot import EAGER, Parrot, draft_with

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.engine.model import mixer_division
from kvconnect.engine.model.divided_states import DividedStates
from kvconnect.engine.model.state_memory import Snapshot, StateMemory, StateRestore
from kvconnect.engine.model.states import StateKey, StateShape, StateSlots
from kvconnect.engine.ranks.copies import make_copies
from kvconnect.engine.ranks.messages import BlockCopy
from kvconnect.errors import RankDivergence, RankLost, UsageError

GREEDY = SamplingParams(max_tokens=12)
LESS_OFTEN = ["lfm2", "minimax", "nemotron_h", "jamba", "kimi_linear", "olmo_hybrid"]
STORED = [64, 32, 0, 0, 96, 0, 80, 48]
"""What is loaded of prompts of 70, 33, 5, 16, 100, 1, 90 tokens and one that branches off at 50."""


@pytest.fixture
def open_ranks(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    """Opens engines of several ranks in float64, with one store; closes them at the end."""
    opened: list[LLM] = []

    def open_one(model: Path, size: int, **more) -> LLM:
        cache = {"tokens_per_block": 16, "max_tokens": 1024, "state_interval": 32}
        store = KvCacheConnectorConfig(
            url=f"disk://{tmp_path}/kv?capacity=64MiB",
            lookup_timeout_ms=60_000,
            load_timeout_s=60,
            staging_bytes=8 << 20,
            overlap_loads=False,
        )
        settings = {"dtype": "float64", "device": "cpu", "max_num_tokens": 25, "connector": store}
        opened.append(
            LLM(
                model,
                tensor_parallel_size=size,
                kv_cache=KvCacheConfig(**cache | more.pop("cache", {})),
                **settings | more,
            )
        )
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()


def loaded(outputs) -> list[int]:
    return [one.reused_store_tokens for one in outputs]


def check_rest(llm: LLM) -> None:
    """Nothing of a request is held, once the last saves have ended."""
    until = time.monotonic() + 60
    while not llm.reset_prefix_cache():
        assert time.monotonic() < until
    check_idle(llm)


def preempted_twice(llm: LLM) -> list[int]:
    """Sends every request back at its third and eighth token; the same step comes once."""
    seen: set[tuple[int, int]] = set()

    def when(request) -> bool:
        at = (request.request_id, request.num_generated_tokens)
        first = at not in seen
        seen.add(at)
        return first and request.num_generated_tokens in {3, 8}

    return preempt(llm, when)


@pytest.mark.parametrize(
    ("family", "size", "restarts"),
    [
        ("qwen3_next", 2, (1,)),
        ("falcon_h1", 2, (1,)),
        *(
            pytest.param(family, size, (size, 1), marks=pytest.mark.slow)
            for family, size in [("qwen3_next", 4), *((one, 2) for one in LESS_OFTEN)]
        ),
    ],
)
def test_cold_preempted_and_restored(family, size, restarts, tiny, open_ranks, reference, prompts):
    """States are stored once for all ranks, and serve engines of any number of ranks."""
    asked = [0, 4, 7] if restarts == (1,) else range(8)
    asked, counts = [prompts[one] for one in asked], [STORED[one] for one in asked]
    expected = reference(tiny(family), asked, 12)
    llm = open_ranks(tiny(family), size)
    outputs = llm.generate(asked, GREEDY)
    assert (tokens(outputs), loaded(outputs)) == (expected, [0] * len(asked))
    sent = preempted_twice(llm)
    outputs = llm.generate(asked, GREEDY)
    assert tokens(outputs) == expected
    assert len(sent) > len(asked)
    assert sum(one.reused_device_tokens for one in outputs) >= sum(counts)
    check_rest(llm)
    llm.close()
    for again in restarts:
        llm = open_ranks(tiny(family), again)
        outputs = llm.generate(asked, GREEDY)
        assert (tokens(outputs), loaded(outputs)) == (expected, counts)
        check_rest(llm)
        llm.close()


def test_ranks_go_back_from_rejected_drafts(tiny, open_ranks, reference, prompts):
    """Each rank computes the accepted tokens again when the next step begins."""
    expected = reference(tiny("qwen3_next"), prompts[:4], 12)
    llm = open_ranks(tiny("qwen3_next"), 2, speculative=EAGER)
    draft_with(llm, Parrot([p + a for p, a in zip(prompts, expected, strict=False)], 3))
    for _ in range(2):
        assert tokens(llm.generate(prompts[:4], GREEDY)) == expected
    stats = llm.stats()
    assert stats.drafted_tokens - 1 > stats.accepted_tokens > 0


def test_ranks_that_divide_other_layers_do_not_start(tiny, open_ranks, monkeypatch):
    monkeypatch.setattr(mixer_division, "_tried", lambda *_: None)  # on the leader alone
    with pytest.raises(RankDivergence, match="rank 1 divides other recurrent layers than the lead"):
        open_ranks(tiny("qwen3_next"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_while_a_snapshot_is_taken_ends_all(
    how, tiny, open_ranks, prompts, monkeypatch
):
    llm = open_ranks(tiny("qwen3_next"), 2)
    gather, lost = DividedStates.gather, []

    def lose_first(self, *args) -> None:
        if not lost:
            os.kill(llm.process_ids[1], how)
            lost.append(how)
        gather(self, *args)

    monkeypatch.setattr(DividedStates, "gather", lose_first)
    handle = llm.submit(prompts[0], GREEDY)
    with pytest.raises(RankLost, match="rank 1"):
        handle.result(60)


@pytest.mark.slow
def test_two_ranks_load_what_one_has_stored(tiny, open_ranks, reference, prompts):
    expected = reference(tiny("qwen3_next"), prompts, 12)
    for size, counts in ((1, [0] * len(prompts)), (2, STORED)):
        llm = open_ranks(tiny("qwen3_next"), size)
        outputs = llm.generate(prompts, GREEDY)
        assert (tokens(outputs), loaded(outputs)) == (expected, counts)
        llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"host_cache_size": 400_000}])
def test_random_trees_in_a_small_cache(more, tiny, open_ranks, open_llm):
    """Blocks move to the host and between pools, while states are restored and taken."""
    rng = np.random.default_rng(5)
    cache = {"max_tokens": 256, "tokens_per_block": 4, "state_interval": 16} | more
    llm = open_ranks(tiny("qwen3_next"), 2, cache=cache, max_num_tokens=24)
    fresh = open_llm(
        tiny("qwen3_next"), kv_cache=KvCacheConfig(max_tokens=1024, enable_block_reuse=False)
    )
    known: list[list[int]] = [[]]
    for _ in range(30):
        batch = []
        for _ in range(4):
            stem = known[rng.integers(len(known))]
            stem = stem[: rng.integers(len(stem) + 1)]
            more_tokens = rng.integers(0, 3, rng.integers(1, 20)).tolist()
            batch.append([*stem, *more_tokens][-60:])
        params = SamplingParams(max_tokens=int(rng.integers(1, 9)), ignore_eos=True)
        outputs = llm.generate(batch, params)
        assert tokens(outputs) == tokens(fresh.generate(batch, params))
        known += [[*one, *out.output_token_ids] for one, out in zip(batch, outputs, strict=True)]
        if rng.integers(3) == 0:
            llm.reset_prefix_cache()
    stats = llm.stats()
    assert stats.reused_device_tokens > 100
    assert stats.reused_store_tokens > 100
    check_rest(llm)


# ---------------------------------------------------------------- what followers copy

KEY = StateKey(0, "recurrent", 0)


class Pool:
    """A copier of one pool of states."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = blocks

    def together(self):
        return torch.no_grad()

    def move(self, group: int, sources, targets) -> None:
        self.blocks[list(targets)] = self.blocks[list(sources)]


def memory_of(blocks: torch.Tensor) -> StateMemory:
    shape = StateShape(KEY, (1,), torch.float64)
    return StateMemory(StateSlots([shape], 2, torch.device("cpu")), {KEY: blocks})


def test_a_follower_restores_a_state_before_its_block_is_written_again():
    blocks = torch.tensor([[10.0], [20.0], [30.0]], dtype=torch.float64)
    memory = memory_of(blocks)
    copies = [
        BlockCopy("move", 0, (1,), (0,)),
        StateRestore(7, 16, 0),
        BlockCopy("move", 0, (2,), (0,)),
        StateRestore(8, 16, 0),
    ]
    make_copies(Pool(blocks), copies, memory)
    assert memory.slots.holds(7, 16)
    assert memory.slots[KEY][:, 0].tolist() == [20.0, 30.0]
    memory.take([Snapshot(7, 2)])
    assert blocks[:, 0].tolist() == [30.0, 20.0, 20.0]


def test_a_restore_without_states_is_an_error():
    with pytest.raises(UsageError, match="this rank's model has no states"):
        make_copies(Pool(torch.zeros(1, 1)), [StateRestore(7, 16, 0)])
