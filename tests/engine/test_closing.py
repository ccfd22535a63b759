"""`LLM.close` with a store that blocks the loop it runs on: it ends, and soon."""

from __future__ import annotations

import threading

import pytest
from observed import patient

from kvconnect import SamplingParams
from kvconnect.backends.memory import MemoryBackend

ONE = SamplingParams(max_tokens=1)
# save_timeout_s and 2 s are promised; the store blocks for a minute.
SAVE_TIMEOUT_S, PROMISED_S, BUSY_MACHINE_S = 0.3, 2.3, 40.0
SOON_S = 0.3  # in place of 1.8 of these 2 s


class Blocking(MemoryBackend):
    """Blocks the event loop, not a thread, in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__(capacity=1 << 20)
        self.entered, self.go_on = threading.Event(), threading.Event()
        self._method = method

    def _block(self, method):
        if method == self._method:
            self.entered.set()
            self.go_on.wait(60)

    async def save(self, blocks):
        self._block("save")
        return await super().save(blocks)

    async def lookup(self, keys):
        self._block("lookup")
        return await super().lookup(keys)

    async def load(self, keys, into):
        self._block("load")
        return await super().load(keys, into)

    async def close(self):
        self._block("close")
        await super().close()


def close_in_time(llm) -> bool:
    closer = threading.Thread(target=llm.close)
    closer.start()
    closer.join(PROMISED_S + BUSY_MACHINE_S)
    return not closer.is_alive()


@pytest.mark.parametrize("method", ["save", "lookup", "load", "close"])
def test_a_store_that_blocks_its_loop(open_llm, llama, monkeypatch, method):
    monkeypatch.setattr("kvconnect.engine.llm._CLOSE_S", SOON_S)
    check_close(open_llm, llama, method)


@pytest.mark.slow
def test_it_takes_no_longer_than_promised(open_llm, llama):
    check_close(open_llm, llama, "load")


def check_close(open_llm, llama, method: str) -> None:
    """Close an engine whose store blocks in `method`: what runs has ended, soon."""
    backend = Blocking(method)
    config = patient(backend, save_timeout_s=SAVE_TIMEOUT_S)
    prompt = list(range(1, 60))
    llm = open_llm(llama, connector=config, max_tokens=80)
    try:
        if method == "load":
            llm.generate(prompt, ONE)  # to the store, and then out of the cache on the device
            llm._engine._connector._worker._queue.flush(60)
            llm.generate([200] * 79, ONE)
        handle = llm.submit(prompt, ONE)
        if method != "close":
            assert backend.entered.wait(60)
        assert close_in_time(llm)
        assert handle.done
    finally:
        backend.go_on.set()
        llm._thread._thread.join(60)
