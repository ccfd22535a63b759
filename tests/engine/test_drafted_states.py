"""Drafts for models with recurrent layers: the states of rejected ones are taken back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from observed import check_idle, preempt, tokens, watch_batches
from parrot import EAGER, Parrot, draft_with
from torch import nn

from kvconnect import KvCacheConfig, SamplingParams
from kvconnect.engine.model import drafted
from kvconnect.engine.model.drafted import DraftedStates
from kvconnect.engine.model.mixer_probe import PROBED_TOKENS, MixerProbe, split_mixers
from kvconnect.engine.model.sequence_step import SequenceStep
from kvconnect.engine.model.states import StateKey, StateShape, StateSlots

PARAMS = SamplingParams(max_tokens=24)
# A gated delta net, a convolution, one that takes no states for several tokens, a cache of its own.
FAMILIES = ["qwen3_next", "lfm2", "mamba", "minimax"]
LESS_OFTEN = [
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba"),
    *("kimi_linear", "lfm2_moe", "lfm3", "mamba2", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text", "zamba", "zamba2", "zaya"),
    *("inkling_text", "recurrent_gemma", "rwkv", "xlstm"),
]
ALL = [*FAMILIES, *(pytest.param(one, marks=pytest.mark.slow) for one in LESS_OFTEN)]


def cache(**more) -> KvCacheConfig:
    given = {"tokens_per_block": 16, "max_tokens": 1024, "state_interval": 32} | more
    return KvCacheConfig(**given)


@pytest.fixture(scope="module")
def several(prompts) -> list[list[int]]:
    return [*prompts[:4], prompts[7]]


@pytest.fixture(scope="module")
def answers(tiny, reference, several):
    """The answers of `generate()`, and the prompts with these."""

    def of(family: str):
        expected = reference(tiny(family), several, 24)
        return expected, [p + a for p, a in zip(several, expected, strict=True)]

    return of


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("family", ALL)
def test_the_answers_are_those_of_plain_greedy_decoding(family, tiny, open_llm, answers, several):
    expected, whole = answers(family)
    llm = open_llm(tiny(family), kv_cache=cache(), speculative=EAGER)
    for wrong_every, count in ((3, 5), (0, 4)):  # the second time on what the first published
        draft_with(llm, Parrot(whole, wrong_every, count=count))
        before = llm.stats()
        assert tokens(llm.generate(several, PARAMS)) == expected
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
    assert [one.reused_store_tokens for one in outputs] == [64, 32, 0, 0, 48]
    # The answers were stored as well, whatever was rejected on their way.
    with open_llm(tiny("qwen3_next"), kv_cache=cache(), connector=connector) as llm:
        turns = [[*one, 3, 4] for one in whole]
        outputs = llm.generate(turns, PARAMS)
        assert tokens(outputs) == reference(tiny("qwen3_next"), turns, 24)
    ends = [(len(one) - 1) // 16 * 16 for one in whole]
    assert [one.reused_store_tokens for one in outputs] == ends


def begun(plan, slots) -> DraftedStates:
    """The states of a step, as `ForwardStep` begins it."""
    slots.proceed(plan)
    return DraftedStates(plan, slots, torch.device("cpu"))


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


def test_what_is_kept_goes_with_the_last_request():
    slots = StateSlots([], 2, torch.device("cpu"))
    for plan in ([step_of(7, 0, 0, count=4)], [step_of(7, 4, 3)]):
        begun(plan, slots).end()
    slots.keep({7, 8})
    assert slots.accepting
    slots.keep(())
    assert not slots.accepting


# ---------------------------------------------------------------- mixers


class Sum(nn.Module):
    """A mixer: the sum of all tokens so far. With `single` it takes states for single tokens."""

    def __init__(self, *, single: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.single = single
        self.calls: list[tuple[int, ...]] = []

    def forward(self, hidden, cache, **_):
        self.calls.append(tuple(hidden.shape[:2]))
        before = cache.get_recurrent_state(0)
        if self.single and hidden.shape[1] > 1:
            before = None
        sums = hidden.cumsum(1) + (0 if before is None else before[:, None])
        cache.update_recurrent_state(sums[:, -1], 0)
        return sums


def step_of(request_id: int, start: int, drafts: int, *, count: int = 1) -> SequenceStep:
    found = np.zeros(count + drafts, np.int32)
    prompt = count > 1
    return SequenceStep(request_id, start, found, num_wanted=1, is_prompt=prompt, tables=())


@pytest.mark.parametrize("single", [False, True])
def test_states_continue_behind_the_accepted_drafts(single):
    random = np.random.default_rng(5)
    mixer = Sum(single=single)
    probe = MixerProbe()
    with probe.watching(mixer), torch.inference_mode():
        mixer(torch.randn(1, PROBED_TOKENS, 2), probe)
    split_mixers(probe)
    slots = StateSlots(tuple(probe.shapes.values()), 4, torch.device("cpu"))
    sums = {one: torch.zeros(2) for one in range(4)}  # after the accepted tokens
    done = dict.fromkeys(sums, 0)
    for turn in range(30):
        drafts = {one: int(random.integers(0, 4)) for one in sums}
        plan = [
            step_of(one, done[one], drafts[one] if turn else 0, count=1 if turn else 3 + one)
            for one in random.permutation(4).tolist()
        ]
        states = begun(plan, slots)
        hidden = torch.randn(1, sum(len(one.tokens) for one in plan), 2)
        with torch.inference_mode():
            found = mixer(hidden, states)
        states.end()
        first = 0
        for one in plan:
            count = len(one.tokens)
            rows = hidden[0, first : first + count].cumsum(0) + sums[one.request_id]
            torch.testing.assert_close(found[0, first : first + count], rows)
            rejected = int(random.integers(0, one.num_drafts + 1))
            sums[one.request_id] = rows[count - 1 - rejected]
            done[one.request_id], first = one.end - rejected, first + count


def test_sequences_with_as_many_drafts_are_computed_together():
    mixer = Sum(single=False)
    probe = MixerProbe()
    with probe.watching(mixer), torch.inference_mode():
        mixer(torch.randn(1, PROBED_TOKENS, 2), probe)
    split_mixers(probe)
    slots = StateSlots(tuple(probe.shapes.values()), 3, torch.device("cpu"))
    plans = [
        [step_of(one, 0, 0, count=4) for one in range(3)],
        [step_of(0, 4, 2), step_of(1, 4, 2), step_of(2, 4, 0)],
        [step_of(0, 5, 0), step_of(1, 5, 0), step_of(2, 5, 0)],  # two drafts of two were wrong
    ]
    calls = []
    for plan in plans:
        mixer.calls.clear()
        states = begun(plan, slots)
        with torch.inference_mode():
            mixer(torch.randn(1, sum(len(one.tokens) for one in plan), 2), states)
        states.end()
        calls.append(list(mixer.calls))
    assert calls == [[(1, 4)] * 3, [(1, 1), (2, 3)], [(2, 1), (3, 1)]]


def test_a_request_that_began_anew_is_not_moved():
    """It was preempted, and has the number and, in its slot, the states of its life before."""
    key = StateKey(0, "recurrent", 0)
    slots = StateSlots([StateShape(key, (2,), torch.float32)], 1, torch.device("cpu"))
    for plan in ([step_of(7, 0, 0, count=4)], [step_of(7, 4, 3)]):
        begun(plan, slots).end()
    slots.restore(7, 6, {key: torch.full((2,), 5.0)})
    begun([step_of(7, 6, 0)], slots).end()
    assert slots.holds(7, 7)
    assert slots[key].tolist() == [[5.0, 5.0]]
    begun([step_of(7, 7, 3)], slots).end()
    begun([step_of(7, 0, 0, count=2)], slots).end()
    assert slots.holds(7, 2)
