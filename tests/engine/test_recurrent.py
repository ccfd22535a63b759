"""Models with recurrent layers: every sequence continues from its own states, and from no other."""

from __future__ import annotations

import json
import logging
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from observed import check_idle, preempt, tokens, watch_batches
from torch import nn
from transformers.cache_utils import LinearAttentionLayer

from kvconnect import LLM, KvCacheConfig, SamplingParams
from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.engine.model.mixer_probe import PROBED_TOKENS, MixerProbe, split_mixers
from kvconnect.engine.model.mixers import ModelCache, PackedStates, Part, SequenceStates
from kvconnect.engine.model.sequence_step import SequenceStep
from kvconnect.engine.model.states import StateKey, StateShape, StateSlots
from kvconnect.errors import UnsupportedModel, UsageError

GREEDY = SamplingParams(max_tokens=12)
FAMILIES = ["qwen3_next", "lfm2", "mamba", "minimax"]
LESS_OFTEN = [
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba"),
    *("kimi_linear", "lfm2_moe", "lfm3", "mamba2", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text", "zamba", "zamba2", "zaya"),
    *("inkling_text", "recurrent_gemma", "rwkv", "xlstm"),
]
ALL = [*FAMILIES, *(pytest.param(one, marks=pytest.mark.slow) for one in LESS_OFTEN)]


# ---------------------------------------------------------------- the engine


@pytest.mark.parametrize("family", ALL)
def test_cold_chunked_batched_and_preempted(family, tiny, open_llm, reference, prompts):
    expected = reference(tiny(family), prompts, 12)
    cold = open_llm(tiny(family))
    assert (
        tokens(out for one in prompts[:2] for out in cold.generate([one], GREEDY)) == expected[:2]
    )
    assert tokens(cold.generate(prompts, GREEDY)) == expected
    for budget in (9, 25):  # chunks of every length, single tokens among them
        chunked = open_llm(tiny(family), max_num_tokens=budget)
        assert tokens(chunked.generate(prompts, GREEDY)) == expected
    seen: set[tuple[int, int]] = set()

    def once(request) -> bool:  # nothing is reused: it passes the same steps again
        at = (request.request_id, request.num_generated_tokens)
        first = at not in seen
        seen.add(at)
        return first and request.num_generated_tokens in {3, 8}

    sent = preempt(chunked, once)
    assert tokens(chunked.generate(prompts, GREEDY)) == expected
    assert len(sent) >= len(prompts)
    check_idle(chunked)


def test_states_change_the_answers(tiny, open_llm, reference, prompts, monkeypatch):
    """Or none of these tests would see a wrong one."""
    expected = reference(tiny("qwen3_next"), prompts, 12)
    llm = open_llm(tiny("qwen3_next"), max_num_tokens=25)
    monkeypatch.setattr(SequenceStates, "get_recurrent_state", lambda *_, **__: None)
    assert tokens(llm.generate(prompts, GREEDY)) != expected


def test_a_slot_begins_without_the_states_of_the_request_before(tiny, open_llm, reference, prompts):
    llm = open_llm(tiny("qwen3_next"), max_batch_size=1, max_num_tokens=25)
    slots = llm._engine._states.slots
    for _ in range(2):
        outputs = llm.generate(prompts[:4], GREEDY)
        assert tokens(outputs) == reference(tiny("qwen3_next"), prompts[:4], 12)
        assert len(slots) <= 1


def test_aborted_requests_give_their_slots_back(tiny, open_llm, reference, prompts):
    llm = open_llm(tiny("qwen3_next"), max_batch_size=2, max_num_tokens=16)
    for _ in range(3):
        for prompt in (prompts[0], prompts[4]):
            stream = llm.stream(prompt, SamplingParams(max_tokens=50))
            next(stream)
            stream.close()
    outputs = llm.generate(prompts[:4], GREEDY)
    assert tokens(outputs) == reference(tiny("qwen3_next"), prompts[:4], 12)
    assert len(llm._engine._states.slots) <= 2
    check_idle(llm)


def test_single_tokens_are_computed_together(tiny, open_llm, prompts, monkeypatch):
    cache = KvCacheConfig(tokens_per_block=16, max_tokens=1024, enable_block_reuse=False)
    llm = open_llm(tiny("lfm2"), kv_cache=cache)
    sizes = []
    called = SequenceStates.store

    def store(self):
        sizes.append(len(self.part.slots))
        called(self)

    monkeypatch.setattr(SequenceStates, "store", store)
    batches = watch_batches(llm)
    llm.generate(prompts[:4], SamplingParams(max_tokens=6, ignore_eos=True))
    assert [count for _, count in batches[-1]] == [1] * 4
    assert sizes[-1] == 4
    assert len(sizes) == 2 * (4 + 5)  # two mixers, four prompts, five steps of single tokens


# ---------------------------------------------------------------- refused


def test_a_manager_without_snapshots_reuses_nothing(
    tiny, open_llm, reference, prompts, caplog, tmp_path
):
    class Plain(KVCacheManager):
        supports_states = False

    with caplog.at_level(logging.WARNING, "kvconnect"):
        llm = open_llm(
            tiny("qwen3_next"),
            kv_cache_manager=Plain,
            max_num_tokens=25,
            connector=f"disk://{tmp_path}/kv?capacity=32MiB",
        )
    for _ in range(2):
        outputs = llm.generate(prompts[:3], GREEDY)
        assert tokens(outputs) == reference(tiny("qwen3_next"), prompts[:3], 12)
        assert {one.reused_device_tokens for one in outputs} == {0}
    assert len(llm.layouts) == 1
    said = [one.getMessage() for one in caplog.records if "recurrent" in one.getMessage()]
    assert said == [
        "The cache manager keeps no recurrent states: no prefix is reused",
        "No recurrent states are kept: the connector is not attached",
    ]
    assert not (tmp_path / "kv").exists()


def test_a_single_token_that_is_computed_otherwise_than_several_is_refused(tiny, tmp_path):
    """At its default `time_step_min` transformers bounds time steps of several tokens only."""
    model = tmp_path / "model"
    shutil.copytree(tiny("zamba2"), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"time_step_min": 0.001}))
    with pytest.raises(UnsupportedModel, match="Zamba2MambaMixer computes something else"):
        LLM(model, kv_cache=KvCacheConfig(max_tokens=256))


def test_a_prefix_without_its_states_ends_the_engine(tiny, open_llm, prompts):
    """A wrong token is worse than an end."""
    cache = KvCacheConfig(tokens_per_block=16, max_tokens=1024, state_interval=32)
    llm = open_llm(tiny("qwen3_next"), kv_cache=cache)
    llm._engine._kv.state_restore = lambda *_: None
    llm.generate([prompts[0]], GREEDY)
    with pytest.raises(UsageError, match="continues at token 64, and the recurrent states are"):
        llm.generate([prompts[0]], GREEDY)


# ---------------------------------------------------------------- slots

KEY = StateKey(0, "conv", 0)


def slots_of(count: int) -> StateSlots:
    return StateSlots([StateShape(KEY, (2, 3), torch.float64)], count, torch.device("cpu"))


def step_of(request_id: int, start: int, count: int) -> SequenceStep:
    found = np.arange(count, dtype=np.int32)
    return SequenceStep(request_id, start, found, num_wanted=1, is_prompt=True, tables=())


def test_a_slot_continues_where_its_states_end():
    slots = slots_of(2)
    slots.begin([step_of(7, 0, 4)])
    slots.end([step_of(7, 0, 4)])
    assert slots.begin([step_of(7, 4, 1), step_of(8, 0, 1)]) == [0, 1]
    with pytest.raises(UsageError, match=r"request 7 continues at token 5, .* those of None"):
        slots.begin([step_of(7, 5, 1)])  # the step before did not end
    slots.end([step_of(7, 4, 1), step_of(8, 0, 1)])
    for wrong in (step_of(7, 4, 1), step_of(7, 6, 1), step_of(9, 3, 1)):
        with pytest.raises(UsageError, match="the recurrent states are those of"):
            slots.begin([wrong])


def test_slots_of_requests_that_ended_are_free():
    slots = slots_of(1)
    slots.begin([step_of(7, 0, 4)])
    slots.end([step_of(7, 0, 4)])
    with pytest.raises(UsageError, match="1 sequences hold recurrent states, and request 8"):
        slots.begin([step_of(8, 0, 4)])
    slots.keep({8})
    assert slots.begin([step_of(8, 0, 4)]) == [0]
    slots.keep(set())
    assert len(slots) == 0


# ---------------------------------------------------------------- transformers' interface


@pytest.mark.parametrize("lengths", [[1, 1, 1, 5], [2, 2], [7, 1, 1], [3, 4, 1]])
def test_convolutions_are_cached_as_in_transformers(lengths):
    slots, theirs = slots_of(1), LinearAttentionLayer()
    index = torch.zeros(1, dtype=torch.int64)
    for number, length in enumerate(lengths):
        ours = SequenceStates(slots, Part(slice(0, length), [0], number > 0, index))
        inputs = torch.randn(1, 2, length, dtype=torch.float64)
        before = ours.get_conv_state(0)
        assert (before is None) == (number == 0)
        full = ours.update_conv_state(inputs, 0, conv_kernel_size=3)
        assert torch.equal(full, theirs.update_conv_state(inputs, conv_kernel_size=3))
        assert torch.equal(ours.get_conv_state(0), theirs.conv_states[0])


def test_a_batch_writes_each_state_back_into_its_slot():
    slots = slots_of(3)
    slots[KEY].copy_(torch.arange(3.0).reshape(3, 1, 1).expand(3, 2, 3))
    batch = SequenceStates(slots, Part(torch.tensor([0, 1]), [2, 0], True, torch.tensor([2, 0])))
    state = batch.get_conv_state(0)
    assert state[:, 0, 0].tolist() == [2.0, 0.0]
    state += 10  # as the kernels of single tokens do
    batch.store()
    assert slots[KEY][:, 0, 0].tolist() == [10.0, 1.0, 12.0]


# ---------------------------------------------------------------- mixers


class Sum(nn.Module):
    """A mixer: the sum of all tokens so far."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, hidden, cache, **_):
        before = cache.get_recurrent_state(0)
        sums = hidden.cumsum(1) + (0 if before is None else before[:, None])
        cache.update_recurrent_state(sums[:, -1], 0)
        return sums


class StepSum(Sum):
    """Takes states for single tokens only."""

    def forward(self, hidden, cache, **_):
        before = cache.get_recurrent_state(0) if hidden.shape[1] == 1 else None
        sums = hidden.cumsum(1) + (0 if before is None else before[:, None])
        cache.update_recurrent_state(sums[:, -1], 0)
        return sums


class Forgetful(Sum):
    """Never reads its state."""

    def forward(self, hidden, cache, **_):
        cache.get_recurrent_state(0)
        cache.update_recurrent_state(hidden.sum(1), 0)
        return hidden.cumsum(1)


def probed(mixer: nn.Module, *more: object) -> MixerProbe:
    probe = MixerProbe()
    with probe.watching(mixer), torch.inference_mode():
        mixer(torch.randn(1, PROBED_TOKENS, 2), probe, *more)
    return probe


@pytest.mark.parametrize("kind", [Sum, StepSum])
def test_sequences_of_a_packed_row_are_computed_apart(kind):
    mixer = kind()
    probe = probed(mixer)
    split_mixers(probe)
    slots = StateSlots(tuple(probe.shapes.values()), 3, torch.device("cpu"))
    sums = {1: torch.zeros(2), 2: torch.zeros(2), 3: torch.zeros(2)}
    done = dict.fromkeys(sums, 0)
    for counts in ({1: 4}, {1: 1, 2: 3}, {1: 3, 2: 2, 3: 1}, {1: 1, 2: 1, 3: 1}, {2: 4, 3: 2}):
        plan = [step_of(one, done[one], count) for one, count in counts.items()]
        cache = PackedStates(plan, slots, torch.device("cpu"))
        hidden = torch.randn(1, sum(counts.values()), 2)
        with torch.inference_mode():
            found = mixer(hidden, cache)
        cache.end()
        first = 0
        for one, count in counts.items():
            expected = hidden[0, first : first + count].cumsum(0) + sums[one]
            torch.testing.assert_close(found[0, first : first + count], expected)
            sums[one], first, done[one] = expected[-1], first + count, done[one] + count


def test_a_mixer_that_does_not_read_its_states_is_refused():
    with pytest.raises(UnsupportedModel, match="Forgetful computes something else from a token"):
        split_mixers(probed(Forgetful()))


def test_arguments_that_cannot_be_divided_are_refused():
    class Wide(Sum):
        def forward(self, hidden, cache, extra):
            return super().forward(hidden, cache)

    with pytest.raises(UnsupportedModel, match=r"Wide is called with a tensor \(3, 1, 4\)"):
        probed(Wide(), torch.zeros(3, 1, 4))


def test_methods_that_the_states_do_not_have_are_refused():
    class Other(Sum):
        def forward(self, hidden, cache):
            return cache.rnn_state[0]

    with pytest.raises(UnsupportedModel, match="Other uses rnn_state of its cache"):
        probed(Other())


def test_a_model_that_asks_for_previous_states_outside_of_its_mixers_is_refused():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = Sum()

        def forward(self, hidden, cache):
            return self.mixer(hidden, cache) if not cache.has_previous_state() else hidden

    with pytest.raises(UnsupportedModel, match="Model asks its cache for previous states"):
        split_mixers(probed(Model()))


def test_layers_of_a_step_come_in_order():
    cache = PackedStates([step_of(1, 0, 1)], slots_of(1), torch.device("cpu"))
    cache.update(None, None, 3)
    with pytest.raises(UsageError, match="layer 3 ran behind layer 3"):
        cache.update(None, None, 3)


def test_without_the_engine_a_mixer_computes_as_before():
    mixer = Sum()
    split_mixers(probed(mixer))
    hidden = torch.randn(1, 3, 2)
    theirs = SimpleNamespace(
        get_recurrent_state=lambda *_: None, update_recurrent_state=lambda *_: None
    )
    torch.testing.assert_close(mixer(hidden, theirs), hidden.cumsum(1))
    assert not isinstance(theirs, ModelCache)
