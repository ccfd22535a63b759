"""Requests in coroutines: awaited, iterated over, cancelled."""

from __future__ import annotations

import asyncio

import pytest

from kvconnect import SamplingParams
from kvconnect.errors import EngineClosed

SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


async def test_awaiting_gives_the_output(llm, prompts):
    expected = llm.generate(prompts, SHORT)
    found = await asyncio.gather(*(llm.generate_async(prompt, SHORT) for prompt in prompts))
    assert [one.output_token_ids for one in found] == [one.output_token_ids for one in expected]


async def test_an_output_can_be_awaited_twice(llm, prompts):
    handle = llm.generate_async(prompts[0], SHORT)
    assert await handle is await handle


async def test_iterating_gives_chunks(llm, prompts):
    expected = llm.generate(prompts[0], SHORT)[0]
    chunks = [chunk async for chunk in llm.generate_async(prompts[0], SHORT)]
    assert sum((chunk.token_ids for chunk in chunks), ()) == expected.output_token_ids
    assert "".join(chunk.text for chunk in chunks) == expected.output_text
    assert [chunk.finish_reason for chunk in chunks][-1] == "length"


async def test_other_coroutines_run_meanwhile(llm, prompts):
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await llm.generate_async(prompts[0], SHORT)
    counting.cancel()
    assert turns > 2


async def test_a_cancelled_await_aborts(llm, prompts):
    handle = llm.generate_async(prompts[0], LONG)
    waiting = asyncio.ensure_future(handle)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert handle.result(timeout=60).finish_reason == "abort"


async def test_an_iteration_left_early_aborts(llm, prompts):
    handle = llm.generate_async(prompts[0], LONG)
    async for chunk in handle:
        assert chunk.token_ids
        break
    assert (await handle).finish_reason == "abort"


async def test_several_completions(llm, prompts):
    params = SamplingParams(n=2, max_tokens=8, temperature=1.0, seed=3, ignore_eos=True)
    expected = llm.generate(prompts[0], params)[0]
    handle = llm.generate_async(prompts[0], params)
    tokens = [[], []]
    async for chunk in handle:
        tokens[chunk.index] += chunk.token_ids
    assert [tuple(one) for one in tokens] == [one.token_ids for one in expected.outputs]
    assert [one.token_ids for one in (await handle).outputs] == [tuple(one) for one in tokens]


async def test_an_engine_that_fails_raises_in_the_coroutine(llm, prompts):
    def broken(step):
        raise RuntimeError("planted")

    llm._engine._model.forward = broken
    awaited, iterated = llm.generate_async(prompts[0]), llm.generate_async(prompts[1])
    with pytest.raises(RuntimeError, match="planted"):
        await awaited
    with pytest.raises((RuntimeError, EngineClosed)):
        async for _ in iterated:
            pass


def test_a_loop_that_ended_does_not_hurt_the_engine(llm, prompts):
    handle = llm.generate_async(prompts[0], SHORT)
    waiting = handle._wait()

    async def listen():
        waiting.send(None)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(listen())
    loop.close()
    assert handle.result(timeout=60).finish_reason == "length"
    waiting.close()
    assert llm.generate(prompts[1], SHORT)[0].finish_reason == "length"
