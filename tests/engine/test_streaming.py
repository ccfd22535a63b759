"""Output as it comes, and requests that are given up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from observed import check_idle, hold_forwards, request_of

from kvconnect import SamplingParams
from kvconnect.engine.request.handle import RequestHandle
from kvconnect.engine.request.live_request import LiveRequest, TokenRun
from kvconnect.engine.request.stops import StopStatus

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=20, ignore_eos=True)


def test_chunks_add_up_to_the_output(llm, prompts):
    whole = llm.generate(prompts[0], SHORT)[0]
    chunks = list(llm.stream(prompts[0], SHORT))
    assert sum((chunk.token_ids for chunk in chunks), ()) == whole.output_token_ids
    assert "".join(chunk.text for chunk in chunks) == whole.output_text
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"


def test_a_stream_starts_before_it_is_iterated(llm, prompts):
    stream = llm.stream(prompts[0], SHORT)
    other = llm.generate(prompts[1], SHORT)[0]
    assert other.finish_reason == "length"
    assert sum(len(chunk.token_ids) for chunk in stream) == 20


def test_a_handle_streams_from_the_start_as_often_as_asked(llm, prompts):
    handle = llm.submit(prompts[0], SHORT)
    output = handle.result()
    for _ in range(2):
        tokens = sum((chunk.token_ids for chunk in handle.stream()), ())
        assert tokens == output.output_token_ids


@pytest.mark.parametrize("iterated", [True, False])
def test_a_stream_that_is_left_is_aborted(llm, prompts, iterated):
    gate, reached = hold_forwards(llm)
    stream = llm.stream(prompts[0], LONG)
    assert reached.wait(60)
    if iterated:
        gate.set()
        next(stream)
    stream.close()
    gate.set()
    llm.generate(prompts[1], SHORT)  # behind the abort in the inbox
    assert llm.stats().running_requests == 0
    assert llm.stats().finished_requests == 2


def test_abort_while_running_keeps_what_came(llm, prompts):
    handle = llm.submit(prompts[0], LONG)
    next(handle.stream())
    handle.abort()
    output = handle.result(timeout=60)
    assert output.finish_reason == "abort"
    assert 1 <= len(output.output_token_ids) < 400
    assert list(handle.stream())[-1].finish_reason == "abort"


def test_abort_while_queued(open_llm, llama, prompts):
    llm = open_llm(llama, max_batch_size=1)
    gate, reached = hold_forwards(llm)
    first = llm.submit(prompts[0], SHORT)
    assert reached.wait(60)
    second = llm.submit(prompts[1], SHORT)
    second.abort()
    gate.set()
    output = second.result(timeout=60)
    assert (output.finish_reason, output.output_token_ids, output.ttft_ms) == ("abort", (), None)
    assert first.result(timeout=60).finish_reason == "length"


def test_abort_in_the_middle_of_a_prompt(open_llm, llama, prompts):
    llm = open_llm(llama, max_num_tokens=8)
    gate, reached = hold_forwards(llm)
    handle = llm.submit(prompts[4], SHORT)
    assert reached.wait(60)
    handle.abort()
    gate.set()
    assert handle.result(timeout=60).output_token_ids == ()
    # What was computed is there for the next one.
    again = llm.generate(prompts[4], SHORT)[0]
    assert again.reused_device_tokens >= 8
    assert again.computed_tokens == 100 - again.reused_device_tokens


def test_abort_twice_and_after_the_end_does_nothing(llm, prompts):
    handle = llm.submit(prompts[0], SHORT)
    output = handle.result()
    handle.abort()
    handle.abort()
    assert handle.result() is output
    llm.close()
    handle.abort()


def test_an_interrupt_between_two_prompts_aborts_the_first(llm, prompts, monkeypatch):
    gate, _ = hold_forwards(llm)
    posted = []

    def post(lives):
        if posted:
            raise KeyboardInterrupt
        posted.append(type(llm)._post(llm, lives))
        return posted[0]

    monkeypatch.setattr(llm, "_post", post)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts[:2], LONG)
    gate.set()
    assert posted[0].result(timeout=60).finish_reason == "abort"


def test_aborted_requests_give_their_blocks_back(llm, prompts):
    handles = [llm.submit(prompt, LONG) for prompt in prompts]
    for handle in handles:
        handle.abort()
    for handle in handles:
        handle.result(timeout=60)
    llm.generate(prompts[0], SHORT)
    check_idle(llm)


def test_tokens_that_come_with_the_end_are_not_lost():
    class Interrupted:
        """A lock that lets the engine go on as soon as a reader has let go of it."""

        def __enter__(self):
            pass

        def __exit__(self, *error):
            if meanwhile:
                meanwhile.pop()()

    def end():
        live.emit(TokenRun(live, [2], [StopStatus("b", None)], 0))
        live.finish("abort")

    live = LiveRequest(request_of([5]), SimpleNamespace(abort=lambda: "c"))
    live.emit(TokenRun(live, [1], [StopStatus("a", None)], 0))
    meanwhile = [end]
    live._lock = Interrupted()
    chunks = list(RequestHandle([live], lambda: None).stream())
    assert [chunk.token_ids for chunk in chunks] == [(1,), (2,)]
    assert "".join(chunk.text for chunk in chunks) == "abc"
    assert [chunk.finish_reason for chunk in chunks] == [None, "abort"]


def test_result_with_a_timeout(llm, prompts):
    gate, _ = hold_forwards(llm)
    handle = llm.submit(prompts[0], SHORT)
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.01)
    gate.set()
    assert handle.result(timeout=60).finish_reason == "length"
