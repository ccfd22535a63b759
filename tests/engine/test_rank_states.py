"""Recurrent models on several ranks, which divide mixers and states, and share snapshots."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from frame_store import RESTORED, cache, loaded, random_trees, reused
from observed import check_rest, patient, preempt, slow, tokens
from parrot import EAGER, Parrot, draft_with

from kvconnect import LLM, SamplingParams
from kvconnect.engine.model import mixer_division
from kvconnect.engine.model.state_memory import Snapshot, StateMemory, StateRestore
from kvconnect.engine.model.states import DividedStates, StateKey, StateShape, StateSlots
from kvconnect.engine.ranks.copies import make_copies
from kvconnect.engine.ranks.messages import BlockCopy
from kvconnect.errors import RankDivergence, RankLost, UsageError

GREEDY = SamplingParams(max_tokens=12)
LESS_OFTEN = ["falcon_h1", "lfm2", "minimax", "nemotron_h", "jamba", "kimi_linear", "olmo_hybrid"]


@pytest.fixture
def open_ranks(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    """Opens engines of several ranks in float64, with one store; closes them at the end."""
    opened: list[LLM] = []

    def open_one(model: Path, size: int, **more) -> LLM:
        store = patient(f"disk://{tmp_path}/kv?capacity=64MiB", staging_bytes=8 << 20)
        settings = {"dtype": "float64", "device": "cpu", "max_num_tokens": 25, "connector": store}
        config = cache(**more.pop("cache", {}))
        opened.append(LLM(model, tensor_parallel_size=size, kv_cache=config, **settings | more))
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()


@pytest.mark.parametrize(
    ("family", "size", "restarts"),
    [
        ("qwen3_next", 2, (1,)),
        *slow(("qwen3_next", 4, (4, 1)), *((one, 2, (2, 1)) for one in LESS_OFTEN)),
    ],
)
def test_cold_drafted_preempted_and_restored(
    family, size, restarts, tiny, open_ranks, reference, several
):
    """States are stored once for all ranks, and serve engines of any number of ranks.

    From rejected drafts each rank goes back: it computes the accepted tokens again when the next
    step begins.
    """
    expected = reference(tiny(family), several, 12)
    llm = open_ranks(tiny(family), size, speculative=EAGER)
    draft_with(llm, Parrot([]))
    outputs = llm.generate(several, GREEDY)
    assert (tokens(outputs), loaded(outputs)) == (expected, [0] * len(several))
    draft_with(llm, Parrot([p + a for p, a in zip(several, expected, strict=True)], 3))
    sent = preempt(llm, lambda request: request.num_generated_tokens in {3, 8}, once=True)
    outputs = llm.generate(several, GREEDY)
    assert tokens(outputs) == expected
    assert sent
    assert sum(reused(outputs)) >= sum(RESTORED)
    stats = llm.stats()
    assert stats.drafted_tokens - 1 > stats.accepted_tokens > 0
    check_rest(llm)
    llm.close()
    for again in restarts:
        llm = open_ranks(tiny(family), again)
        outputs = llm.generate(several, GREEDY)
        assert (tokens(outputs), loaded(outputs)) == (expected, RESTORED)
        check_rest(llm)
        llm.close()


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
def test_two_ranks_load_what_one_has_stored(tiny, open_ranks, reference, several):
    expected = reference(tiny("qwen3_next"), several, 12)
    for size, counts in ((1, [0] * len(several)), (2, RESTORED)):
        llm = open_ranks(tiny("qwen3_next"), size)
        outputs = llm.generate(several, GREEDY)
        assert (tokens(outputs), loaded(outputs)) == (expected, counts)
        llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"host_cache_size": 400_000}])
def test_random_trees_in_a_small_cache(more, tiny, open_ranks, open_llm):
    """Blocks move to the host and between pools, while states are restored and taken."""
    config = {"max_tokens": 256, "tokens_per_block": 4, "state_interval": 16} | more
    llm = open_ranks(tiny("qwen3_next"), 2, cache=config, max_num_tokens=24)
    fresh = open_llm(tiny("qwen3_next"), kv_cache=cache(enable_block_reuse=False))
    random_trees(llm, fresh, np.random.default_rng(5), 120, LLM.reset_prefix_cache)
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
