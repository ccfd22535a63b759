"""A request that loses its blocks while it runs is computed again, and nobody notices."""

from __future__ import annotations

import pytest
from observed import preempt, tokens

from kvconnect import SamplingParams
from kvconnect.request import RequestState

GREEDY = SamplingParams(max_tokens=30)


@pytest.mark.parametrize("connector", [None, "memory:?capacity=32MiB"])
def test_while_it_generates(connector, llama, open_llm, reference, prompts):
    llm = open_llm(llama, connector=connector, max_num_tokens=40)
    sent = preempt(llm, lambda request: request.num_generated_tokens in {3, 17})
    outputs = llm.generate(prompts, GREEDY)
    assert tokens(outputs) == reference(llama, prompts, 30)
    assert len(sent) >= 2 * len(prompts) - 2  # those that stopped early were spared
    assert llm.stats().preemptions == len(sent)


def test_in_the_middle_of_its_prompt(llama, open_llm, reference, prompts):
    llm = open_llm(llama, max_num_tokens=16)
    sent = preempt(
        llm,
        lambda one: one.state is RequestState.CONTEXT and one.num_computed_tokens >= 32,
        once=True,
    )
    outputs = llm.generate(prompts, GREEDY)
    assert tokens(outputs) == reference(llama, prompts, 30)
    assert sent


def test_the_last_admitted_goes_when_blocks_are_held_back(llama, open_llm, reference, prompts):
    """A failed load may keep blocks that nobody may touch: then not all can run to their end."""
    llm = open_llm(llama, max_tokens=256)
    engine = llm._engine
    step = engine.step
    held = []

    def step_with_blocks_gone():
        worked = step()
        free = engine._kv.get_num_free_blocks()
        if len(engine._scheduler.running) >= 2 and not held:
            engine._kv.blocks.add_sequence(10**6, [1] * (16 * (free - 1)))
            held.append(True)
            while (victim := engine._scheduler.one_too_many()) is not None:
                engine._send_back(victim)
        elif held == [True] and len(engine._scheduler.running) == 0:
            engine._kv.blocks.abort(10**6, 0)
            held.append(False)
            llm._thread._inbox.ring()
        return worked

    engine.step = step_with_blocks_gone
    outputs = llm.generate(prompts[:3], GREEDY)
    assert tokens(outputs) == reference(llama, prompts[:3], 30)
    assert llm.stats().preemptions >= 1
