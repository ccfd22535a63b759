"""Errors in the engine's thread, interrupts, and closing: nobody waits for ever."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams, TransferConfig
from kvconnect.errors import EngineClosed

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)
TWICE = SamplingParams(max_tokens=5, ignore_eos=True, temperature=1.0, n=2)


class Broken(RuntimeError):
    pass


@pytest.fixture
def no_collection():
    gc.disable()
    yield
    gc.enable()


def break_after(llm, passes):
    forward, count = llm._engine._model.forward, iter(range(passes))

    def broken(step):
        if next(count, None) is None:
            raise Broken("the matrix is gone")
        return forward(step)

    llm._engine._model.forward = broken


def test_an_error_in_a_step_reaches_every_waiter(open_llm, llama, prompts):
    llm = open_llm(llama, max_batch_size=2)
    handles = [llm.submit(prompt, LONG) for prompt in prompts]  # running and queued ones
    break_after(llm, 3)
    for handle in handles:
        with pytest.raises(Broken, match="the matrix is gone"):
            handle.result(timeout=60)
        with pytest.raises(Broken):
            list(handle.stream())


def test_an_error_while_the_cache_is_reset_reaches_its_caller(open_llm, llama):
    llm = open_llm(llama)

    def broken() -> bool:
        raise Broken("the manager is gone")

    caught: list[str] = []

    def reset() -> None:
        try:
            llm.reset_prefix_cache()
        except Broken as error:
            caught.append(str(error))

    llm._engine.reset_cache = broken
    caller = threading.Thread(target=reset, daemon=True)
    caller.start()
    caller.join(timeout=10)
    assert caught == ["the manager is gone"]
    llm._thread._thread.join(timeout=60)
    with pytest.raises(EngineClosed, match="has failed"):
        llm.generate([1])


def test_a_dead_engine_says_what_it_died_of(open_llm, llama):
    llm = open_llm(llama)
    break_after(llm, 0)
    with pytest.raises(Broken):
        llm.generate([1])
    llm.close()
    with pytest.raises(EngineClosed, match="has failed") as caught:
        llm.generate([1])
    assert isinstance(caught.value.__cause__, Broken)


def test_a_closed_engine_takes_no_requests(open_llm, llama):
    llm = open_llm(llama)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosed, match="was closed"):
        llm.submit([1])


def test_a_connector_that_breaks_at_the_end_leaves_nobody_waiting(open_llm, llama):
    llm = open_llm(llama)
    handle = llm.submit([1], LONG)
    next(handle.stream())

    def broken() -> None:
        raise Broken("no way out")

    llm._engine._connector.shutdown = broken
    llm.close()
    assert handle.result(timeout=60).finish_reason == "abort"
    with pytest.raises(EngineClosed, match="has failed"):
        llm.submit([1])


def test_closing_aborts_what_runs(open_llm, llama, prompts):
    llm = open_llm(llama, max_batch_size=1)
    handles = [llm.submit(prompt, LONG) for prompt in prompts[:3]]
    next(handles[0].stream())
    llm.close()
    for handle in handles:
        assert handle.result(timeout=60).finish_reason == "abort"


def test_closing_from_another_thread_than_the_waiter(open_llm, llama):
    llm = open_llm(llama)
    handle = llm.submit([1], LONG)
    next(handle.stream())
    closer = threading.Thread(target=llm.close)
    closer.start()
    assert handle.result(timeout=60).finish_reason == "abort"
    closer.join()


def test_ctrl_c_in_a_waiting_caller_aborts_its_requests(open_llm, llama):
    llm = open_llm(llama)
    emit = llm._engine._emit

    def emit_and_interrupt(run):
        emit(run)
        if run.live.request.num_generated_tokens == 3:
            os.kill(os.getpid(), signal.SIGINT)

    llm._engine._emit = emit_and_interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], LONG)
    llm._engine._emit = emit
    llm.generate([3], SHORT)
    assert llm.stats().running_requests == 0
    assert llm.stats().finished_requests == 3


def test_an_engine_that_is_dropped_ends_its_thread(llama):
    llm = LLM(llama, kv_cache=KvCacheConfig(max_tokens=256))
    thread = llm._thread._thread
    del llm
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_handle_keeps_the_engine_open(llama):
    llm = LLM(llama, kv_cache=KvCacheConfig(max_tokens=256))
    thread = llm._thread._thread
    handle = llm.submit([1], SamplingParams(max_tokens=200, ignore_eos=True))
    del llm
    gc.collect()
    assert handle.result(60).finish_reason == "length"
    assert thread.is_alive()
    del handle
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


USED = {
    "alone": {},
    "a store": {"connector": {}},
    "peers": {"connector": {"transfer": TransferConfig()}},
    "a host tier and drafts": {
        "kv_cache": KvCacheConfig(max_tokens=256, host_cache_size=1 << 20),
        "connector": {},
        "speculative": "ngram",
    },
    "recurrent states": {"family": "qwen3_next", "connector": {}},
    "windows": {"family": "mistral", "connector": {}},
}


@pytest.mark.parametrize("options", USED.values(), ids=list(USED))
def test_a_closed_engine_frees_its_memory_at_once(tiny, prompts, no_collection, options):
    """Circles of references would keep pools and weights until Python searches for such."""
    options = dict(options)
    if (connector := options.get("connector")) is not None:
        options["connector"] = KvCacheConnectorConfig(url="memory:?capacity=16MiB", **connector)
    options.setdefault("kv_cache", KvCacheConfig(max_tokens=256))
    llm = LLM(tiny(options.pop("family", "llama")), **options)
    llm.generate(prompts[:2], SHORT)
    ended, running = llm.submit(prompts[0], TWICE), llm.submit(prompts[1], TWICE)
    answer = ended.result(60)
    llm.close()
    parts = [llm._kv, llm._model, llm._kv._memory.pools[0]]
    if connector is not None:
        parts += [llm._engine._connector._scheduler, llm._engine._connector._worker._access.staging]
    kept = [weakref.ref(one) for one in parts]
    del parts
    del llm
    assert [one() for one in kept] == [None] * len(kept)
    # A handle that is kept has its outputs only.
    assert ended.result() == answer
    assert running.done
    running.abort()


@pytest.mark.parametrize("closed", [True, False])
def test_an_engine_that_failed_goes_with_what_refers_to_it(llama, closed):
    answered = []
    kept = weakref.ref(failed_engine(llama, answered, closed=closed)._kv)
    gc.collect()
    assert kept() is None
    assert answered[0].result().finish_reason == "length"


def failed_engine(model, answered: list, *, closed: bool) -> LLM:
    """One whose error was raised for a caller, whose frames it refers to since then."""
    llm = LLM(model, kv_cache=KvCacheConfig(max_tokens=256))
    answered.append(llm.submit([1], SHORT))
    answered[0].result(timeout=60)
    break_after(llm, 0)
    handle = llm.submit([1], SHORT)
    with contextlib.suppress(Broken):
        handle.result(timeout=60)
    llm._thread._thread.join(timeout=60)
    if closed:
        llm.close()
    return llm


FORGETFUL = """
import sys
from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams, TransferConfig
store = KvCacheConnectorConfig(
    url=sys.argv[2], lookup_timeout_ms=60_000, overlap_loads=False
)
llm = LLM(sys.argv[1], kv_cache=KvCacheConfig(max_tokens=256), connector=store)
handle = llm.submit([7] * 100, SamplingParams(max_tokens=2))
del llm
print(handle.result().reused_store_tokens)
"""


def test_a_process_that_forgets_to_close_still_saves(llama, open_llm, tmp_path):
    url = f"disk://{tmp_path}/kv?capacity=8MiB"
    command = [sys.executable, "-c", FORGETFUL, str(llama), url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert run.stdout.strip() == "0"
    cache = KvCacheConfig(max_tokens=256)
    with open_llm(llama, connector=url, kv_cache=cache, dtype="auto") as llm:
        assert llm.generate([7] * 100, SamplingParams(max_tokens=2))[0].reused_store_tokens == 99
