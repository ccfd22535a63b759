"""``nixl:``: a peer that dies, freezes, restarts, lies or is late costs time, nothing else."""

from __future__ import annotations

import asyncio
import time

import pytest
from nixl_peer import NixlPeer, eventually, hits

from kvconnect.backends import open_backend
from kvconnect.testing import BlockMaker

TIMEOUT_S = 0.5
LONG_S = 60.0
"""Longer than a call takes on a busy machine; a call that hangs takes longer."""


@pytest.fixture(params=["tcp", pytest.param("nixl", marks=pytest.mark.slow)])
def transport(request):
    return request.param


@pytest.fixture
def lease():
    return "10s"


@pytest.fixture(scope="module")
def alive():
    """Instances that no test has killed, by transport and lease."""
    peers = {}
    yield peers
    for peer in peers.values():
        peer.end()


@pytest.fixture
def far(transport, lease, alive):
    """An instance in another process; tests may put another one in its place."""
    peer = alive.pop((transport, lease), None)
    peers = [peer or NixlPeer(f"nixl://?transport={transport}&lease={lease}")]
    yield peers
    if not peers[0].process.is_alive():
        return
    peers[0].wake()
    peers[0].ask("lie", "")
    alive[transport, lease] = peers[0]


@pytest.fixture
async def near(far, transport):
    url = f"nixl://{far[0].address}?transport={transport}&verify=full"
    store = open_backend(f"{url}&patience=1s&timeout={TIMEOUT_S}s").inner
    await store.open([BlockMaker.layout])
    yield store
    await store.close()


async def misses(kit, store, keys) -> float:
    """Seconds that a load took which filled nothing; later nothing is written either."""
    into = kit.buffers(len(keys))
    start = time.monotonic()
    assert await store.load(keys, into) == 0
    took = time.monotonic() - start
    for buffer in into:
        assert kit.margins_whole(buffer)
        buffer.fill_(0xC5)
    await asyncio.sleep(0.05)
    assert all(map(kit.untouched, into))
    return took


def before_reading(monkeypatch, store, happens) -> None:
    """Has `happens` called between a grant and its first read."""
    fetcher = store._parts.fetcher
    read = fetcher._read_all

    async def reads(*arguments):
        happens()
        return await read(*arguments)

    monkeypatch.setattr(fetcher, "_read_all", reads)


async def test_a_peer_that_is_killed_is_a_miss_and_another_in_its_place_is_used(
    kit, far, near, transport
):
    keys = kit.keys("killed", count=4)
    far[0].save(kit.chain(keys))
    assert await near.lookup(keys) == 4
    address = far[0].address
    far[0].end()
    assert await misses(kit, near, keys) < LONG_S
    far[0] = NixlPeer(f"nixl://?transport={transport}&listen={address}")
    far[0].save(kit.chain(keys[:2]))
    await eventually(lambda: hits(kit, near, keys[:2]))
    assert await near.lookup(keys) == 2  # what the other had is gone with it


async def test_a_peer_that_is_frozen_costs_its_timeout_once(kit, far, near):
    keys = kit.keys("frozen", count=4)
    far[0].save(kit.chain(keys))
    assert await near.lookup(keys) == 4
    far[0].freeze()
    assert await misses(kit, near, keys) < LONG_S
    start = time.monotonic()
    for _ in range(200):  # nothing waits for it any more
        assert await near.lookup(kit.keys("others", count=2)) == 0
    assert time.monotonic() - start < 180 * TIMEOUT_S
    far[0].wake()
    await eventually(lambda: hits(kit, near, keys))


async def test_a_peer_that_freezes_while_it_is_read_is_a_miss(
    kit, far, near, monkeypatch, transport
):
    keys = kit.keys("frozen in a read", count=4)
    far[0].save(kit.chain(keys))
    before_reading(monkeypatch, near, far[0].freeze)
    if transport == "tcp":
        assert await misses(kit, near, keys) < LONG_S
    else:  # shared memory of a frozen process can be read; its lease decides
        start = time.monotonic()
        await hits(kit, near, keys)
        assert time.monotonic() - start < LONG_S
    monkeypatch.undo()
    far[0].wake()
    await eventually(lambda: hits(kit, near, keys))


@pytest.mark.parametrize("lie", ["digests", "no digests", "units", "outside", "region"])
async def test_a_peer_that_lies_is_a_miss_and_is_left_alone(kit, far, near, lie):
    keys = kit.keys("lies", count=4)
    far[0].save(kit.chain(keys))
    far[0].ask("lie", lie)
    await misses(kit, near, keys)
    if lie in {"digests", "no digests", "units"}:
        assert (await near.stats())["peers"] == 0
        assert await near.lookup(keys) == 0


async def test_without_digests_a_lie_is_found_by_the_frame(kit, far, transport):
    keys = kit.keys("frames", count=4)
    url = f"nixl://{far[0].address}?transport={transport}&verify=none&patience=1s"
    maker = open_backend("memory:")
    async with kit.opened(maker):  # which seals the frames
        blocks = kit.chain(keys)
        await maker.save(blocks)
    far[0].save(blocks)
    near = open_backend(url)
    async with kit.opened(near):
        into = kit.buffers(4)
        assert await near.load(keys, into) == 4
        assert all(map(kit.holds, into, keys))
        far[0].ask("lie", "units")
        assert await near.load(keys, kit.buffers(4)) == 0


async def test_a_block_that_broke_in_its_owners_memory_is_dropped_there(kit, far, transport):
    keys = kit.keys("broken", count=3)
    maker = open_backend("memory:")
    async with kit.opened(maker):
        blocks = kit.chain(keys)
        await maker.save(blocks)
    far[0].save(blocks)
    far[0].ask("spoil", keys[1], 200)
    near = open_backend(f"nixl://{far[0].address}?transport={transport}&verify=full&patience=1s")
    async with kit.opened(near):
        assert await near.load(keys, kit.buffers(3)) == 1
        assert await near.lookup(keys) == 1
        assert far[0].ask("lookup", [keys[1]]) == 0


@pytest.mark.parametrize("lease", ["300ms"])
async def test_what_was_read_after_the_lease_ended_does_not_count(kit, far, near, monkeypatch):
    keys = kit.keys("late", count=4)
    far[0].save(kit.chain(keys))
    client = near._parts.node.client
    client._timer.close()  # nothing is renewed
    fetcher = near._parts.fetcher
    read = fetcher._read_all

    async def reads(handle, claimed, granted, into):
        fine = await read(handle, claimed, granted, into)
        assert fine
        await eventually(lambda: _leases(far[0], 0))
        return fine

    monkeypatch.setattr(fetcher, "_read_all", reads)
    await misses(kit, near, keys)


async def _leases(peer, number) -> bool:
    stats = await asyncio.to_thread(peer.ask, "stats")
    return stats["leases"] == number
