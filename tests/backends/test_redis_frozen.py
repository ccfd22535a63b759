"""A load that is under way when the server freezes."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from harness import PROMPT, open_llm
from redis_faults import Relay

from kvconnect import KvCacheConnectorConfig, SamplingParams
from kvconnect.backends import open_backend
from kvconnect.backends.guard import breaker
from kvconnect.errors import BackendTimeout, BackendUnavailable

MIB = 1 << 20
DEADLINE_S = 2.0  # 3 MiB have passed by then, on a busy machine, too
ENGINE_DEADLINE_S = 1.0
FAILURES_TO_OPEN = 5
FEW = SamplingParams(max_tokens=4, ignore_eos=True)


class Line:
    """The network before a server that freezes with an answer half way, until it is `mended`.

    Attributes:
        under_way: set when that happened.
    """

    def __init__(self, server):
        self.relay = Relay(server.port)
        self.under_way = threading.Event()
        self._server = server
        self._whole = threading.Event()

    def break_at(self, nbytes):
        """Pass on so much of each value; then freeze the server, and swallow the rest for now."""

        def change(data, passed):
            if passed + len(data) > nbytes and not self._whole.is_set():
                self.under_way.set()
                self._server.freeze()
                self._whole.wait(60)
            return data

        self._whole.clear()
        self.relay.change = change

    def mended(self):
        self._whole.set()
        self._server.thaw()


@pytest.fixture
def line(own_redis):
    made = Line(own_redis)
    yield made
    made.mended()
    made.relay.close()


async def test_loads_under_way_end_at_their_deadline_and_touch_nothing_handed_on(
    kit, line, monkeypatch
):
    monkeypatch.setattr(breaker, "_FIRST_PAUSE_S", 0.05)
    url = f"redis://127.0.0.1:{line.relay.port}?timeout=120s&connections={FAILURES_TO_OPEN}"
    store = open_backend(url, raw=True, deadline_s=DEADLINE_S)
    await store.open([])
    keys = kit.keys("late", count=3)
    assert await store.inner.save([kit.block(key, nbytes=2 * MIB) for key in keys]) == 3
    into = [[kit.buffer(2 * MIB) for _ in keys] for _ in range(FAILURES_TO_OPEN)]
    handed_on = []

    async def load(buffers):
        start = time.monotonic()
        with pytest.raises(BackendTimeout) as caught:
            await store.load(keys, buffers)
        assert DEADLINE_S <= time.monotonic() - start < 60
        handed_on.append(asyncio.ensure_future(hand_on(caught.value.pending, buffers)))

    async def hand_on(pending, buffers):
        await asyncio.wrap_future(pending)
        for buffer in buffers:
            buffer.fill_(7)

    line.break_at(3 * MIB)
    await asyncio.gather(*map(load, into))
    assert line.under_way.is_set()
    done, _ = await asyncio.wait(handed_on, timeout=0.1)
    assert not done  # they are still the loads'
    assert not store.available
    with pytest.raises(BackendUnavailable):
        await store.lookup(keys)
    line.mended()
    await asyncio.gather(*handed_on)
    async with asyncio.timeout(60):
        while not store.available:  # noqa: ASYNC110  its own probes find out
            await asyncio.sleep(0.01)
    buffers = [kit.buffer(2 * MIB) for _ in keys]
    assert await store.load(keys, buffers) == 3
    assert all(kit.holds(b, key, framed=False) for b, key in zip(buffers, keys, strict=True))
    assert all(bool((one == 7).all()) for some in into for one in some)
    await store.close()


def test_request_whose_load_goes_dead_is_computed(line, own_redis, llama):
    prompts = [PROMPT, PROMPT[::-1], PROMPT[3:]]
    with open_llm(llama, own_redis.url) as llm:
        answers = [list(one.output_token_ids) for one in llm.generate(prompts, FEW)]
    config = KvCacheConnectorConfig(
        url=f"redis://127.0.0.1:{line.relay.port}?timeout=120s",
        lookup_timeout_ms=60_000,
        load_timeout_s=ENGINE_DEADLINE_S,
        save_timeout_s=ENGINE_DEADLINE_S,
    )
    with open_llm(llama, config) as llm:
        line.break_at(10_000)  # more than what is said of keys, less than one value
        start = time.monotonic()
        (output,) = llm.generate(prompts[:1], FEW)
        assert line.under_way.is_set()
        assert time.monotonic() - start < 60
        assert list(output.output_token_ids) == answers[0]
        line.mended()  # what was swallowed arrives while the others are answered
        for output, answer in zip(llm.generate(prompts, FEW), answers, strict=True):
            assert list(output.output_token_ids) == answer
