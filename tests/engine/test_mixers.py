"""Mixers and the slots of their states, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers.cache_utils import LinearAttentionLayer

from kvconnect.engine.model.drafted import DraftedStates
from kvconnect.engine.model.mixer_probe import PROBED_TOKENS, MixerProbe, split_mixers
from kvconnect.engine.model.mixers import ModelCache, PackedStates, Part, SequenceStates
from kvconnect.engine.model.sequence_step import SequenceStep
from kvconnect.engine.model.states import StateKey, StateShape, StateSlots
from kvconnect.errors import UnsupportedModel, UsageError

CPU = torch.device("cpu")


def step_of(request_id: int, start: int, count: int = 1, *, drafts: int = 0) -> SequenceStep:
    found = np.zeros(count + drafts, np.int32)
    prompt = count > 1
    return SequenceStep(request_id, start, found, num_wanted=1, is_prompt=prompt, tables=())


# ---------------------------------------------------------------- slots

KEY = StateKey(0, "conv", 0)


def slots_of(count: int) -> StateSlots:
    return StateSlots([StateShape(KEY, (2, 3), torch.float64)], count, CPU)


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


def begun(plan, slots: StateSlots) -> DraftedStates:
    """The states of a step with drafts, as `ForwardStep` begins it."""
    slots.proceed(plan)
    return DraftedStates(plan, slots, CPU)


def test_what_is_kept_goes_with_the_last_request():
    slots = StateSlots([], 2, CPU)
    for plan in ([step_of(7, 0, 4)], [step_of(7, 4, drafts=3)]):
        begun(plan, slots).end()
    slots.keep({7, 8})
    assert slots.accepting
    slots.keep(())
    assert not slots.accepting


def test_a_request_that_began_anew_is_not_moved():
    """It was preempted, and has the number and, in its slot, the states of its life before."""
    key = StateKey(0, "recurrent", 0)
    slots = StateSlots([StateShape(key, (2,), torch.float32)], 1, CPU)
    for plan in ([step_of(7, 0, 4)], [step_of(7, 4, drafts=3)]):
        begun(plan, slots).end()
    slots.restore(7, 6, {key: torch.full((2,), 5.0)})
    begun([step_of(7, 6)], slots).end()
    assert slots.holds(7, 7)
    assert slots[key].tolist() == [[5.0, 5.0]]
    begun([step_of(7, 7, drafts=3)], slots).end()
    begun([step_of(7, 0, 2)], slots).end()
    assert slots.holds(7, 2)


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
    """A mixer: the sum of all tokens so far. With `single` it takes states for single tokens."""

    def __init__(self, *, single: bool = False) -> None:
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


def slots_for(mixer: nn.Module, count: int) -> StateSlots:
    """The slots of a mixer that from now on computes the sequences of a packed row apart."""
    probe = probed(mixer)
    split_mixers(probe)
    return StateSlots(tuple(probe.shapes.values()), count, CPU)


def compute(mixer: nn.Module, states, plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the tokens of `plan` in a row; returns them and the result."""
    hidden = torch.randn(1, sum(len(one.tokens) for one in plan), 2)
    with torch.inference_mode():
        found = mixer(hidden, states)
    states.end()
    return hidden[0], found[0]


@pytest.mark.parametrize("single", [False, True])
def test_sequences_of_a_packed_row_are_computed_apart(single):
    mixer = Sum(single=single)
    slots = slots_for(mixer, 3)
    sums = {one: torch.zeros(2) for one in (1, 2, 3)}
    done = dict.fromkeys(sums, 0)
    for counts in ({1: 4}, {1: 1, 2: 3}, {1: 3, 2: 2, 3: 1}, {1: 1, 2: 1, 3: 1}, {2: 4, 3: 2}):
        plan = [step_of(one, done[one], count) for one, count in counts.items()]
        hidden, found = compute(mixer, PackedStates(plan, slots, CPU), plan)
        first = 0
        for one, count in counts.items():
            expected = hidden[first : first + count].cumsum(0) + sums[one]
            torch.testing.assert_close(found[first : first + count], expected)
            sums[one], first, done[one] = expected[-1], first + count, done[one] + count


@pytest.mark.parametrize("single", [False, True])
def test_states_continue_behind_the_accepted_drafts(single):
    random = np.random.default_rng(5)
    mixer = Sum(single=single)
    slots = slots_for(mixer, 4)
    sums = {one: torch.zeros(2) for one in range(4)}  # after the accepted tokens
    done = dict.fromkeys(sums, 0)
    for turn in range(30):
        drafts = {one: int(random.integers(0, 4)) for one in sums}
        plan = [
            step_of(one, done[one], drafts=drafts[one]) if turn else step_of(one, 0, 3 + one)
            for one in random.permutation(4).tolist()
        ]
        hidden, found = compute(mixer, begun(plan, slots), plan)
        first = 0
        for one in plan:
            count = len(one.tokens)
            rows = hidden[first : first + count].cumsum(0) + sums[one.request_id]
            torch.testing.assert_close(found[first : first + count], rows)
            rejected = int(random.integers(0, one.num_drafts + 1))
            sums[one.request_id] = rows[count - 1 - rejected]
            done[one.request_id], first = one.end - rejected, first + count


def test_sequences_with_as_many_drafts_are_computed_together():
    mixer = Sum()
    slots = slots_for(mixer, 3)
    plans = [
        [step_of(one, 0, 4) for one in range(3)],
        [step_of(0, 4, drafts=2), step_of(1, 4, drafts=2), step_of(2, 4)],
        [step_of(one, 5) for one in range(3)],  # two drafts of two were wrong
    ]
    calls = []
    for plan in plans:
        mixer.calls.clear()
        compute(mixer, begun(plan, slots), plan)
        calls.append(list(mixer.calls))
    assert calls == [[(1, 4)] * 3, [(1, 1), (2, 3)], [(2, 1), (3, 1)]]


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
