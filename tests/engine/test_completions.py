"""Several completions of one prompt: they share its blocks, and each has its seed."""

from __future__ import annotations

import pytest
from observed import hold_forwards

from kvconnect import SamplingParams

PROMPT = list(range(100))  # six blocks and a tail of four tokens
THREE = SamplingParams(n=3, max_tokens=12, temperature=1.0, seed=7, ignore_eos=True)


def test_the_prompt_is_computed_once(llm):
    output = llm.generate(PROMPT, THREE)[0]
    assert len(output.outputs) == 3
    assert output.prompt_tokens == 100
    # Each of the others takes the six full blocks.
    assert output.computed_tokens == 100 + 2 * 4
    assert output.reused_device_tokens == 2 * 96


def test_each_completion_is_that_of_its_own_seed(llm):
    output = llm.generate(PROMPT, THREE)[0]
    alone = [
        llm.generate(PROMPT, THREE.model_copy(update={"n": 1, "seed": 7 + index}))[0]
        for index in range(3)
    ]
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert [one.token_ids for one in output.outputs] == [one.output_token_ids for one in alone]
    assert [one.text for one in output.outputs] == [one.output_text for one in alone]
    assert output.output_token_ids == output.outputs[0].token_ids
    assert len({one.token_ids for one in output.outputs}) == 3


def test_seeds_below_zero(llm):
    params = THREE.model_copy(update={"n": 2, "seed": -2})
    first, second = (llm.generate(PROMPT, params)[0] for _ in range(2))
    assert [one.token_ids for one in first.outputs] == [one.token_ids for one in second.outputs]


def test_why_each_one_stopped(llm):
    params = SamplingParams(n=8, max_tokens=30, temperature=1.0, seed=1, stop=("e", "a"))
    outputs = llm.generate(PROMPT, params)[0].outputs
    for one in outputs:
        assert (one.finish_reason == "stop") == (one.stop_reason in {"e", "a"})
        assert not {"e", "a"} & set(one.text)
    assert {one.finish_reason for one in outputs} >= {"stop"}


def test_chunks_of_all_come_in_one_stream(llm):
    whole = llm.generate(PROMPT, THREE)[0]
    tokens, texts, ended = [[], [], []], ["", "", ""], []
    for chunk in llm.stream(PROMPT, THREE):
        tokens[chunk.index] += chunk.token_ids
        texts[chunk.index] += chunk.text
        ended += [chunk.index] if chunk.finish_reason else []
    assert [tuple(one) for one in tokens] == [one.token_ids for one in whole.outputs]
    assert texts == [one.text for one in whole.outputs]
    assert sorted(ended) == [0, 1, 2]


def test_an_abort_before_the_first_token_ends_all(llm):
    gate, reached = hold_forwards(llm)
    handle = llm.submit(PROMPT, THREE)
    assert reached.wait(60)
    handle.abort()
    gate.set()
    output = handle.result(timeout=60)
    assert [one.finish_reason for one in output.outputs] == ["abort"] * 3
    assert llm.generate(PROMPT, SamplingParams(max_tokens=1))[0].finish_reason == "length"
    assert llm.stats().running_requests == llm.stats().waiting_requests == 0


def test_leaving_a_stream_aborts_all(llm):
    params = SamplingParams(n=3, max_tokens=300, temperature=1.0, ignore_eos=True)
    stream = llm.stream(PROMPT, params)
    while next(stream).index != 2:
        pass
    stream.close()
    llm.generate(PROMPT, SamplingParams(max_tokens=1))  # behind the aborts in the inbox
    stats = llm.stats()
    assert stats.running_requests == 0
    assert stats.free_blocks == stats.max_blocks


def test_closing_the_engine_ends_those_that_have_not_begun(open_llm, llama):
    llm = open_llm(llama)
    gate, reached = hold_forwards(llm)
    handle = llm.submit(PROMPT, THREE)
    assert reached.wait(60)
    llm._thread.close(wait=False)
    gate.set()
    output = handle.result(timeout=60)
    assert {one.finish_reason for one in output.outputs} == {"abort"}


def test_an_engine_that_fails_fails_all(open_llm, llama):
    llm = open_llm(llama)

    def broken(step):
        raise RuntimeError("planted")

    llm._engine._model.forward = broken
    handle = llm.submit(PROMPT, THREE)
    with pytest.raises(RuntimeError, match="planted"):
        handle.result(timeout=60)
    assert all(live.done for live in handle._lives)
    assert handle.done


def test_penalties_count_each_completions_own_tokens(llm):
    params = THREE.model_copy(update={"frequency_penalty": 2.0, "repetition_penalty": 1.2})
    output = llm.generate(PROMPT, params)[0]
    last = params.model_copy(update={"n": 1, "seed": 9})
    assert output.outputs[2].token_ids == llm.generate(PROMPT, last)[0].output_token_ids
