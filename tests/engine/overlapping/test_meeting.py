"""Prompts whose end is loaded while their beginning is computed: the tokens are the same."""

from __future__ import annotations

import numpy as np
import pytest
from beside import ANY, GREEDY, PROMPT, T, loads, nothing, until, worker
from late_store import LateStore
from observed import slow, words

from kvconnect import KvCacheConnectorConfig, SamplingParams
from kvconnect.engine.loaded_tokens import join_head, note_computed
from kvconnect.engine.sampling.drafts import NgramSpeculation
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest, RequestState

TAILS = {
    "in a block": (12 * T + 5, True),
    "at its end": (12 * T + 5, False),
    "in the last": (12 * T, True),
}
"""Where a match ends: the length of the prompt, and whether the store has its tail."""
HOW = {
    "drafts": {"speculative": NgramSpeculation(num_draft_tokens=5, min_ngram_size=1)},
    "undivided": {"enable_chunked_prefill": False, "max_num_tokens": 16 * T},
    "one block a step": {"max_num_tokens": T},
    "preempting": {"scheduling": "max_utilization", "cache": {"max_tokens": 18 * T}},
    "a snapshot at each block": {"cache": {"state_interval": T}},
}


def models(*names: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("model", names, indirect=True)


# ---------------------------------------------------------------------- every kind


@pytest.mark.parametrize(
    ("model", "where"),
    [
        *(("llama", where) for where in TAILS),
        ("mixed", "in a block"),
        *((model, "at its end") for model in ("mistral", "qwen3_next", "mamba2")),
        *slow(("mixed", "at its end")),
        *slow(("gpt_oss", "in a block")),
    ],
    indirect=["model"],
)
def test_at_a_block(where, late):
    length, has_tail = TAILS[where]
    late.open()
    end = length - 1 if has_tail else 12 * T
    for key in () if has_tail else set().union(*late.keys[12:]):
        del late.store.frames[key]
    last = -(-end // T)
    for number in range(last, -1, -1 if len(late.llm.layouts) == 1 else -3):
        met = late.meet(number, end)
        late.ask(PROMPT[:length], reused=end - met)
    assert late.beside.asked > 4


@pytest.mark.parametrize("how", HOW)
@models(*ANY)
def test_however_it_is_served(how, late):
    prompt = [*PROMPT[: 12 * T], *PROMPT[:5]]  # drafts find something
    late.open(**HOW[how])
    for number in (12, 7):
        met = late.meet(number, 12 * T)
        late.ask(prompt, reused=12 * T - met)


@pytest.mark.parametrize("num_tokens", [1, T - 1, T + 2])
def test_a_chunk_that_ends_in_a_block_that_has_come(num_tokens, late):
    """Computing zeroes the rest of the block that it ends in: all of that block is computed."""
    llm = late.open(cache={"state_interval": 16 * T}, max_num_tokens=12 * T)
    for held in (1, 10):
        late.hold(held)

        def decide(request: LlmRequest, _budget: int, held: int = held) -> int:
            load = loads(llm)._overlapping.get(request.request_id)
            if load is None or request.num_computed_tokens:
                return 0
            late.beside.wait(load, held)
            return held * T + num_tokens  # whether or not the engine knows yet what has come

        late.beside.decide = decide
        computed = (held + -(-num_tokens // T)) * T
        late.ask(reused=max(0, late.end - computed))


@pytest.mark.parametrize("num_tokens", [4 * T + 3, 8 * T + 1])
@models(*ANY)
def test_behind_what_the_device_has(num_tokens, late):
    """With states its computing begins with a snapshot, which is not held meanwhile."""
    llm = late.open()
    frames, begin = late.store.frames, num_tokens // T * T
    for number in (12, 10, 8):
        late.beside.decide, late.store.frames = nothing, {}
        llm.generate(PROMPT[:num_tokens], SamplingParams(max_tokens=1))
        late.store.frames = frames
        late.hold(number)
        met = max(late.met(number), begin)
        late.beside.decide = late.beside.after(llm, met)
        output = late.ask(reused=late.end - met)
        assert output.reused_device_tokens == begin


# ---------------------------------------------------------------------- full attention


@models("llama")
def test_while_blocks_come_as_it_computes(late):
    """One block comes for every two that are computed."""
    llm, keys = late.open(max_num_tokens=2 * T), late.keys
    late.hold(len(keys))

    def decide(request: LlmRequest, budget: int) -> int:
        number = len(keys) - request.num_computed_tokens // (2 * T)
        late.store.release(set().union(*keys[number:]))
        return late.beside.after(llm, late.met(number))(request, budget)

    late.beside.decide = decide
    # After eight blocks, four have come: 9 to 12. One more is computed.
    late.ask(reused=late.end - 9 * T)


@models("llama")
def test_steps_that_are_smaller_than_a_block(late):
    llm = late.open(max_num_tokens=3)
    met = late.meet(8)

    def decide(request: LlmRequest, budget: int) -> int:
        left = request.loaded_from - request.num_computed_tokens
        return min(left, budget, late.beside.after(llm, met)(request, T * budget))

    late.beside.decide = decide
    late.ask(reused=late.end - 8 * T)


@models("deepseek_v3", "gpt_neox")
def test_other_attention(late):
    """Keys and values of different sizes, and rotation of a part of them."""
    late.open()
    for number in (13, 7, 0):
        late.ask(reused=late.end - late.meet(number))


@pytest.mark.parametrize("number", [0, 8, 13])
@models("llama")
def test_a_prompt_without_an_answer(number, late):
    late.open()
    met = late.meet(number)
    late.ask(reused=late.end - met, max_tokens=0)


@models("llama")
def test_a_prompt_without_an_answer_stays_on_the_device(late):
    llm = late.open()
    late.meet(8)
    llm.generate(PROMPT, SamplingParams(max_tokens=0))
    late.store.frames.clear()
    assert late.ask(reused=0).computed_tokens == 1


@models("llama")
def test_switched_off(late):
    config = KvCacheConnectorConfig(
        backend=late.store, lookup_timeout_ms=60_000, overlap_loads=False
    )
    late.open(connector=config)
    late.ask(reused=late.end)
    assert late.beside.asked == 0


# ---------------------------------------------------------------------- recurrent states


@pytest.mark.parametrize("how", ["held", "lost", "broken", "failing"])
@models("mamba2")
def test_blocks_that_only_count_tokens_are_saved_and_not_loaded(how, late):
    late.open()
    counts = set().union(*late.store.keys_at(PROMPT, states=False))
    assert len(counts) == 12
    setattr(late.store, how, counts)
    late.beside.decide = nothing
    late.ask(reused=late.end)


@pytest.mark.parametrize("state", [RequestState.LOADING, RequestState.CONTEXT])
@models("qwen3_next")
def test_the_snapshot_where_they_meet_is_kept(state, late):
    """While it loads, and after a load that brought only the end."""
    llm = late.open()
    if state is RequestState.LOADING:
        late.meet(8)
    else:
        late.store.failing = late.keys[7]
        late.beside.decide = nothing
    output = llm.generate(PROMPT, GREEDY)[0]
    late.check(output, reused=4 * T)
    late.store.failing, late.beside.decide = set(), nothing
    for common, reused in ((5 * T, 4 * T), (11 * T, 8 * T)):
        prompt = [*PROMPT[:common], *words(9, 7)]
        output = llm.generate(prompt, GREEDY)[0]
        late.check(output, prompt, reused=0)
        assert output.reused_device_tokens == reused
    late.check_rest()


@models("qwen3_next")
def test_without_the_state_at_the_end_nothing_is_reused(late):
    """Though all keys and values are there."""
    late.open()
    late.store.held = late.keys[11] - late.store.keys_at(PROMPT, states=False)[11]
    assert late.store.held
    late.beside.decide = late.once_the_store_waits
    late.ask(reused=0)


@pytest.mark.parametrize("number", [3, 5, 12])
@models("jamba")
def test_mixers_that_step_reach_their_load_in_one_chunk(number, late):
    """A snapshot that is due before ends no chunk: behind it they would wait for the store."""
    late.open(max_num_tokens=16 * T)
    met = late.meet(number)
    meet = late.beside.decide
    late.beside.decide = lambda request, budget: (
        0 if request.num_computed_tokens else meet(request, budget)
    )
    late.check(late.submit().result(timeout=60), reused=late.end - met)
    late.check_rest()


@models("qwen3_next")
def test_large_states_are_loaded_in_parts(late, monkeypatch):
    """Their layers are in frames of their own, and all are there before the request jumps."""
    divided = KvCacheLayout.divided
    monkeypatch.setattr(KvCacheLayout, "divided", lambda layout: divided(layout, 1))
    store, llm = late.store, late.open(max_num_tokens=3 * T)
    store.become(LateStore())
    store.writable = True
    llm.generate(PROMPT, GREEDY)
    until(lambda: worker(llm)._queue.flush(1) and llm.reset_prefix_cache())
    store.writable = False
    assert {group for group, _ in store.blocks.values()} == {0, 1, 2}
    last = [key for key, (group, own) in store.blocks.items() if group and own == PROMPT[88:96]]
    for held, met in ((set(last[1:]), 0), (late.keys[3], 4 * T)):
        store.held = held
        late.beside.decide = late.beside.after(llm, met) if met else late.once_the_store_waits
        late.ask(reused=late.end - met if met else 0)


@pytest.mark.parametrize(("computed", "joined"), [(20, 20), (32, 64)])
def test_a_head_is_joined_at_the_end_of_a_block_alone(computed, joined):
    """The rest of a block that is computed in part does not come."""
    tokens, root = np.arange(100, dtype=np.int32), BlockKey(bytes(32))
    request = LlmRequest(1, tokens, chain_root=root, tokens_per_block=16)
    request.load_end = request.loaded_from = 96
    note_computed(request, computed)
    request.load_head = 64
    join_head(request)
    assert request.num_computed_tokens == joined
