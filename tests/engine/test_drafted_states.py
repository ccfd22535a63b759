"""Drafts for models with recurrent layers: the states of rejected ones are taken back."""

from __future__ import annotations

import pytest
from frame_store import cache, loaded
from observed import check_idle, preempt, slow, tokens, watch_batches
from parrot import EAGER, Parrot, draft_with

from kvconnect import SamplingParams
from kvconnect.engine.model import drafted
from kvconnect.engine.model.states import StateSlots

PARAMS = SamplingParams(max_tokens=24)
# A gated delta net, a convolution, one that takes no states for several tokens, a cache of its own.
FAMILIES = ["qwen3_next", "lfm2", "mamba", "minimax"]
LESS_OFTEN = [
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba"),
    *("kimi_linear", "lfm2_moe", "lfm3", "mamba2", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text", "zamba", "zamba2", "zaya"),
    *("inkling_text", "recurrent_gemma", "rwkv", "xlstm"),
]
ALL = [*FAMILIES, *slow(*LESS_OFTEN)]


@pytest.fixture(scope="module")
def answers(tiny, reference, several):
    """The answers of `generate()`, and the prompts with these."""

    def of(family: str, max_tokens: int = 24):
        expected = reference(tiny(family), several, max_tokens)
        return expected, [p + a for p, a in zip(several, expected, strict=True)]

    return of


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("family", ALL)
def test_the_answers_are_those_of_plain_greedy_decoding(family, tiny, open_llm, answers, several):
    expected, whole = answers(family, 12)
    llm = open_llm(tiny(family), kv_cache=cache(), speculative=EAGER)
    for wrong_every, count in ((3, 5), (0, 4)):  # the second time on what the first published
        draft_with(llm, Parrot(whole, wrong_every, count=count))
        before = llm.stats()
        assert tokens(llm.generate(several, SamplingParams(max_tokens=12))) == expected
        after = llm.stats()
        drafts = after.drafted_tokens - before.drafted_tokens
        accepted = after.accepted_tokens - before.accepted_tokens
        if family in FAMILIES:  # of others some answers are short
            assert drafts - 1 > accepted > 0 if wrong_every else drafts == accepted > 0
    check_idle(llm)


def test_a_rejected_draft_in_the_states_changes_the_answers(
    tiny, open_llm, answers, several, monkeypatch
):
    """Or none of these tests would see one."""
    expected, whole = answers("qwen3_next")
    llm = open_llm(tiny("qwen3_next"), kv_cache=cache(), speculative=EAGER)
    draft_with(llm, Parrot(whole, 3))

    def as_it_is(self, request_id, num_tokens, _):
        slot = self._slots[request_id]
        self._held[slot] = (request_id, num_tokens)
        return slot

    monkeypatch.setattr(drafted._Kept, "_compute", lambda *_: None)
    monkeypatch.setattr(StateSlots, "restore", as_it_is)
    assert tokens(llm.generate(several, PARAMS)) != expected


def test_drafts_that_prompt_lookup_finds(tiny, open_llm, reference):
    prompts = [[7, 8, 9] * 11, [5] * 20]
    expected = reference(tiny("qwen3_next"), prompts, 24)
    llm = open_llm(tiny("qwen3_next"), speculative=EAGER)
    assert tokens(llm.generate(prompts, PARAMS)) == expected
    assert llm.stats().drafted_tokens > 4


def test_preempted_between_a_rejected_draft_and_the_next_step(tiny, open_llm, answers, several):
    expected, whole = answers("qwen3_next")
    for reuse in (False, True):
        config = cache(enable_block_reuse=reuse)
        llm = open_llm(tiny("qwen3_next"), kv_cache=config, speculative=EAGER, max_num_tokens=40)
        draft_with(llm, Parrot(whole, 3))
        seen: set[tuple[int, int]] = set()

        def once(request, seen=seen) -> bool:
            first = request.request_id, request.num_generated_tokens // 6
            return first[1] > 0 and not (first in seen or seen.add(first))

        sent = preempt(llm, once)
        assert tokens(llm.generate(several, PARAMS)) == expected
        assert len(sent) > len(several)
        check_idle(llm)


# ---------------------------------------------------------------- snapshots, stores


def test_drafts_end_before_the_next_snapshot(tiny, open_llm, answers, several):
    expected, whole = answers("qwen3_next")
    llm = open_llm(tiny("qwen3_next"), kv_cache=cache(), speculative=EAGER)
    draft_with(llm, Parrot(whole, count=40))
    batches = watch_batches(llm)
    assert tokens(llm.generate(several[:1], PARAMS)) == expected[:1]
    # The prompt of 70 up to snapshots at 32 and 64; then the answer, with one behind token 80.
    assert [count for ((_, count),) in batches] == [32, 32, 6, 9, 1, 13]
    # The next turn starts from there.
    turn = [*whole[0], 3, 4, 5]
    (again,) = llm.generate([turn], PARAMS)
    assert again.reused_device_tokens == 80


def test_no_answer_is_shorter_of_snapshots_at_every_token(tiny, open_llm, answers, several):
    expected, whole = answers("lfm2")
    config = cache(tokens_per_block=2, state_interval=2)
    llm = open_llm(tiny("lfm2"), kv_cache=config, speculative=EAGER)
    draft_with(llm, Parrot(whole))
    for _ in range(2):
        assert tokens(llm.generate(several, PARAMS)) == expected


def test_with_a_store_and_a_restart(tiny, open_llm, answers, several, reference, tmp_path):
    expected, whole = answers("qwen3_next")
    connector = f"disk://{tmp_path}/kv?capacity=64MiB"
    for _ in range(2):
        llm = open_llm(tiny("qwen3_next"), kv_cache=cache(), connector=connector, speculative=EAGER)
        draft_with(llm, Parrot(whole, wrong_every=3))
        outputs = llm.generate(several, PARAMS)
        assert tokens(outputs) == expected
        llm.close()
    assert loaded(outputs) == [64, 32, 0, 0, 48]
    # The answers were stored as well, whatever was rejected on their way.
    with open_llm(tiny("qwen3_next"), kv_cache=cache(), connector=connector) as llm:
        turns = [[*one, 3, 4] for one in whole]
        outputs = llm.generate(turns, PARAMS)
        assert tokens(outputs) == reference(tiny("qwen3_next"), turns, 24)
    ends = [(len(one) - 1) // 16 * 16 for one in whole]
    assert loaded(outputs) == ends


# ---------------------------------------------------------------- memory


def test_nothing_is_kept_of_requests_that_ended_or_were_aborted(
    tiny, open_llm, answers, several, monkeypatch
):
    _, whole = answers("lfm2")
    llm = open_llm(tiny("lfm2"), kv_cache=cache(), speculative=EAGER, max_batch_size=2)
    slots, sizes = llm._engine._states.slots, []
    copies = StateSlots.copies

    def counted(self, request_ids):
        sizes.append(len(request_ids))
        assert not self.accepting  # what was kept of the step before is freed
        return copies(self, request_ids)

    monkeypatch.setattr(StateSlots, "copies", counted)
    draft_with(llm, Parrot(whole, 3))
    streams = [llm.stream(one, PARAMS) for one in several[:3]]
    for _ in range(3):
        next(streams[0])
    for stream in streams:
        stream.close()
    (_,) = llm.generate([several[0]], PARAMS)
    assert sizes
    assert max(sizes) <= 2  # one copy for each request that has drafts
    check_idle(llm)
    llm.close()
    llm._engine.step()  # as its thread does after the last one
    assert len(slots) == 0
    assert not slots.accepting
