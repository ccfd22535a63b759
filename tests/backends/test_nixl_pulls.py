"""``nixl:``'s reads end only when nothing writes to their targets any more."""

from __future__ import annotations

import asyncio

import pytest

from kvconnect.backends import open_backend
from kvconnect.backends.lanes import Lane
from kvconnect.backends.nixl import pulls as module
from kvconnect.backends.nixl.pulls import Pulls
from kvconnect.errors import ConfigurationError, PullFailed
from kvconnect.testing import BlockMaker
from kvconnect.transfer.pull import Pull
from kvconnect.transfer.reads import Reads
from kvconnect.transfer.transport import PeerHandle

PEER = PeerHandle("peer", "0" * 32, ())
TIMEOUT_S = 5.0


class Held:
    """A transport whose pulls end when a test says so."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.pulls: list[Pull] = []
        self.deadlines: list[float] = []

    def pull(self, peer, reads, *, deadline_s):
        self.deadlines.append(deadline_s)
        if reads.nbytes == 1:
            raise ConfigurationError("planted")
        self.began.set()
        self.pulls.append(Pull(reads.total_nbytes))
        return self.pulls[-1]

    def end_all(self) -> None:
        for pull in self.pulls:
            pull.finish()


@pytest.fixture
def held():
    return Held()


@pytest.fixture
async def pulls(held):
    lane = Lane("rebuild", 1)
    yield Pulls(held, held.end_all, lane, timeout_s=TIMEOUT_S)
    await lane.close()


def reads_of(nbytes):
    return Reads(0, [0], 0, [0], nbytes)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_read_that_is_cancelled_again_and_again_ends_with_its_pulls(held, pulls):
    reading = asyncio.create_task(pulls.run(PEER, [reads_of(16), reads_of(8)]))
    await turns()
    for _ in range(3):
        reading.cancel()
        await turns()
        assert not reading.done()
    assert all(isinstance(pull.done.exception(0), PullFailed) for pull in held.pulls[:1])
    held.end_all()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_pull_that_failed_and_does_not_end_is_ended_with_all(held, pulls, monkeypatch):
    monkeypatch.setattr(module, "_QUIET_S", 0.01)
    reading = asyncio.create_task(pulls.run(PEER, [reads_of(16)]))
    await turns()
    held.pulls[0].fail(PullFailed("peer", "planted"))
    assert await asyncio.wait_for(reading, 60) is False
    assert held.pulls[0].terminal.is_set()


async def test_a_read_that_cannot_begin_ends_those_beside_it(held, pulls):
    reading = asyncio.create_task(pulls.run(PEER, [reads_of(16), reads_of(1)]))
    await turns()
    assert held.pulls[0].done.done()
    assert not reading.done()
    held.end_all()
    assert await reading is False


async def test_a_deadline_counts_all_bytes_under_way(held, pulls):
    rate = module._LEAST_BYTES_PER_S
    first = asyncio.create_task(pulls.run(PEER, [reads_of(int(rate))]))
    await turns()
    second = asyncio.create_task(pulls.run(PEER, [reads_of(int(2 * rate))]))
    await turns()
    assert held.deadlines == [TIMEOUT_S + 1, TIMEOUT_S + 3]
    held.end_all()
    assert await asyncio.gather(first, second) == [True, True]
    third = asyncio.create_task(pulls.run(PEER, [reads_of(int(rate))]))
    await turns()
    assert held.deadlines[-1] == TIMEOUT_S + 1
    held.end_all()
    await third


async def test_a_load_that_is_cancelled_ends_only_when_its_reads_have(kit, held, monkeypatch):
    """Some of its portions are being read then, and others wait for their turn."""
    far = open_backend("nixl://?transport=tcp&capacity=16MiB").inner
    await far.open([BlockMaker.layout])
    query = "transport=tcp&staging=1MiB&verify=none&patience=1s"
    near = open_backend(f"nixl://{far.address}?{query}").inner
    await near.open([BlockMaker.layout])
    monkeypatch.setattr(near._parts.node.transport, "pull", held.pull)
    key = kit.key("cancelled")
    try:
        await far.save([kit.block(key, nbytes=3 << 20)])
        loading = asyncio.create_task(near.load([key], kit.buffers(1, 3 << 20)))
        await asyncio.wait_for(held.began.wait(), 60)
        for _ in range(2):
            loading.cancel()
            await turns()
            assert not loading.done()
        held.end_all()
        with pytest.raises(asyncio.CancelledError):
            await loading
        staging = near._parts.fetcher._staging
        assert staging._free.qsize() * staging.slot_nbytes == staging.tensor.numel()
    finally:
        held.end_all()
        await near.close()
        await far.close()
