"""An engine in a forked child, where none of its threads is: errors, no waiting."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from kvconnect import SamplingParams
from kvconnect.engine.request.handle import RequestHandle

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)


def in_child(work: Callable[[], object]) -> str:
    """What `work` returns or raises in a forked child, as text; it has 20 s."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            told = repr(work())
        except BaseException as error:  # noqa: BLE001  told to the parent
            told = f"{type(error).__name__}: {error}"
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told_by_child:
        told = told_by_child.read()
    _, status = os.waitpid(child, 0)
    return told or f"ended with status {status}"


async def chunks_of(handle):
    return [chunk async for chunk in handle]


async def output_of(handle):
    return await handle


@pytest.mark.parametrize(
    "work",
    [
        lambda llm, handle, begun: llm.generate([1], SHORT),
        lambda llm, handle, begun: llm.generate("text", SHORT),
        lambda llm, handle, begun: llm.submit([1], SHORT),
        lambda llm, handle, begun: list(llm.stream([1], SHORT)),
        lambda llm, handle, begun: handle.result(),
        lambda llm, handle, begun: list(handle.stream()),
        lambda llm, handle, begun: list(begun),
        lambda llm, handle, begun: asyncio.run(output_of(handle)),
        lambda llm, handle, begun: asyncio.run(chunks_of(handle)),
        lambda llm, handle, begun: list(RequestHandle([*handle._lives] * 2, handle.abort).stream()),
    ],
    ids=[
        *("generate", "text", "submit", "stream", "result", "stream_of_handle", "begun"),
        *("await", "async_for", "several"),
    ],
)
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_what_would_wait_for_a_thread_that_is_not_there(open_llm, llama, work):
    llm = open_llm(llama)
    handle = llm.submit([1], LONG)
    begun = handle.stream()
    next(begun)
    told = in_child(lambda: work(llm, handle, begun))
    assert told.startswith(f"EngineClosed: the engine runs in process {os.getpid()}, and this one")
    assert told.endswith("was forked from it; make an LLM in this process")
    handle.abort()
    assert handle.result(60).finish_reason == "abort"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_what_needs_no_thread(open_llm, llama):
    llm = open_llm(llama)
    running, done = llm.submit([1], LONG), llm.submit([2], SHORT)
    expected = done.result(60).output_token_ids
    told = in_child(lambda: (running.abort(), llm.close(), done.result().output_token_ids))
    assert told == repr((None, None, expected))
    assert llm.generate([3], SHORT)[0].finish_reason == "length"  # the parent's goes on
