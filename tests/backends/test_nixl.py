"""``nixl:``: what several instances have is found and loaded by each; errors at the start."""

from __future__ import annotations

import asyncio
import socket
import time
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from urllib.parse import quote

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nixl_peer import eventually

from kvconnect.backends import open_backend
from kvconnect.backends.nixl import node
from kvconnect.backends.nixl.fetch import portions, reads_of
from kvconnect.backends.nixl.find import NixlFinder
from kvconnect.backends.nixl.publish import Publisher
from kvconnect.backends.nixl.settings import NixlSettings
from kvconnect.errors import ConfigurationError, OutOfBlocks
from kvconnect.testing import BlockMaker
from kvconnect.testing.faults.clock import ShiftedClock
from kvconnect.transfer import peers
from kvconnect.transfer.control.endpoint import Timing
from kvconnect.transfer.control.keyed import MAX_TOKENS, ClaimKeys, GrantKeys
from kvconnect.transfer.control.messages import Unknown

PATIENT = "patience=60s&timeout=60s"


def instance(*peers: str, transport: str = "tcp", query: str = ""):
    return open_backend(
        f"nixl://{','.join(peers)}?transport={transport}&{PATIENT}{query and '&' + query}"
    ).inner


@pytest.fixture
async def opened():
    """Opens stores, which are closed at the end, the last one first."""
    async with AsyncExitStack() as stack:

        async def open_(store, access="store"):
            await store.open([BlockMaker.layout], access)
            stack.push_async_callback(store.close)
            return store

        yield open_


async def holds(kit, store, keys) -> bool:
    """Whether all of `keys` are found and loaded right."""
    into = kit.buffers(len(keys))
    found = await store.lookup(keys)
    loaded = await store.load(keys, into)
    assert all(map(kit.holds, into[:loaded], keys))
    return found == loaded == len(keys)


# ------------------------------------------------------------------------------------ what it does


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
async def test_a_run_comes_from_here_and_from_several_peers(kit, opened, transport):
    one = await opened(instance(transport=transport))
    other = await opened(instance(transport=transport))
    here = await opened(
        instance(one.address, other.address, transport=transport, query="verify=full")
    )
    keys = kit.keys("run", count=40)
    blocks = kit.chain(keys)
    for store, part in ((one, slice(0, 13)), (here, slice(13, 20)), (other, slice(20, 40))):
        assert await store.save(blocks[part]) == len(blocks[part])
    assert await holds(kit, here, keys)
    assert await here.lookup([*keys, kit.key("nobody's")]) == 40
    assert (await here.stats())["blocks"] == 7  # what was loaded of peers is theirs


async def test_a_peer_that_is_known_by_two_names_stays_connected(kit, opened):
    far = await opened(instance())
    by_name = far.address.replace("127.0.0.1", "localhost")
    near = await opened(instance(far.address, by_name))
    keys = kit.keys("two names", count=6)
    await far.save(kit.chain(keys))
    taken = near._parts.node.peers
    first = next(one for one in taken._links.values() if one.handle is not None)
    channel = first.channel
    other = next(one for one in taken._links.values() if one is not first)

    async def tried_again():
        return other.peer.attempts > 3

    await eventually(tried_again)
    assert first.channel is channel
    assert channel.is_open
    assert [link.address for link in taken.ready()] == [first.address]
    assert await holds(kit, near, keys)


async def test_a_block_is_not_found_at_its_peer_from_its_own_end_on(kit, opened):
    far = await opened(instance())
    near = await opened(instance(far.address))
    assert near.capabilities.expires_each
    keys = kit.keys("own end", count=6)
    with ShiftedClock() as clock:
        end = time.time() + 60
        blocks = [replace(one, expires_at=end) for one in kit.chain(keys)[4:]]
        assert await far.save([*kit.chain(keys)[:4], *blocks]) == 6
        clock.forward(59)
        assert await holds(kit, near, keys)
        clock.forward(2)
        assert await near.lookup(keys) == await far.lookup(keys) == 4
        assert await near.load(keys, kit.buffers(6)) == 4


async def test_a_peer_that_has_dropped_a_block_since_it_was_found_is_not_believed(kit, opened):
    far = await opened(instance())
    near = await opened(instance(far.address))
    keys = kit.keys("dropped", count=6)
    await far.save(kit.chain(keys))
    assert await near.lookup(keys) == 6
    far._parts.blocks.delete([keys[3]])
    into = kit.buffers(6)
    assert await near.load(keys, into) == 3
    assert kit.untouched(into[3])


async def test_tails_that_peers_have_are_found_and_loaded(kit, opened):
    """As of a prompt that another instance answered, whose last block is filled in part."""
    far, other = await opened(instance()), await opened(instance())
    near = await opened(instance(far.address, other.address))
    parent, mine, theirs, third = kit.keys("tails", count=4)
    tokens = {
        key: np.arange(number, 7 + number) for number, key in enumerate((mine, theirs, third))
    }
    for store, keys in ((near, [mine]), (far, [theirs, mine]), (other, [third])):
        blocks = [
            replace(kit.block(key), parent=parent, tokens=tokens[key].astype(np.int32))
            for key in keys
        ]
        assert await store.save(blocks) == len(keys)
    found = {child.key: list(child.tokens) for child in await near.children(parent)}
    assert found == {key: list(ids) for key, ids in tokens.items()}
    assert await near.children(third) == []
    assert await near.children(None) == []
    assert await holds(kit, near, [theirs])


async def test_more_tokens_than_fit_a_message_are_told_in_part(kit, opened):
    far = await opened(instance())
    near = await opened(instance(far.address))
    parent, *keys = kit.keys("long tails", count=4)
    tokens = np.zeros(MAX_TOKENS // 2, np.int32)
    assert await far.save([replace(kit.block(k), parent=parent, tokens=tokens) for k in keys]) == 3
    assert {child.key for child in await near.children(parent)} == set(keys[1:])  # the last ones


async def test_what_is_deleted_here_is_deleted_at_the_peers(kit, opened):
    far = await opened(instance())
    near = await opened(instance(far.address))
    keys = kit.keys("deleted", count=3)
    await far.save(kit.chain(keys))
    await near.delete(keys[1:])
    assert [await far.lookup([key]) for key in keys] == [1, 0, 0]


async def test_blocks_arrive_in_registered_memory_without_a_copy(kit, opened, monkeypatch):
    far = await opened(instance())
    near = instance(far.address)
    nbytes = kit.frame_nbytes
    ring = torch.zeros(8 * nbytes, dtype=torch.uint8)
    near.register(ring)
    await opened(near)

    async def nothing_staged():
        raise AssertionError("a slot of the staging memory was taken")

    monkeypatch.setattr(near._parts.fetcher._staging, "take", nothing_staged)
    keys = kit.keys("direct", count=4)
    await far.save(kit.chain(keys))
    into = [ring[number * nbytes : (number + 1) * nbytes] for number in (1, 3, 4, 6)]
    assert await near.load(keys, into) == 4
    for key, data in zip(keys, into, strict=True):
        assert torch.equal(
            data[-kit.layout.block_nbytes :], kit.content(key, kit.layout.block_nbytes)
        ) or kit.holds(data.clone(), key)
    assert not ring[:nbytes].any()
    assert not ring[2 * nbytes : 3 * nbytes].any()


class LatePeer:
    """A peer that was late before, and answers nothing."""

    late = True
    asked = 0
    answers = ()

    def ask(self, numbered):
        self.asked += 1
        self.answers = (numbered(1),)
        return Future()


async def test_a_late_peer_is_asked_once_and_not_waited_for(kit):
    link = LatePeer()
    found = NixlFinder(
        SimpleNamespace(present=lambda keys: [False] * len(keys), children=lambda _: ()),
        SimpleNamespace(ready=lambda: [link]),
        patience_s=3600,
    )
    async with asyncio.timeout(60):
        assert [await found.lookup([kit.key(1)]) for _ in range(3)] == [0, 0, 0]
        assert link.asked == 1
        assert await found.children(None) == []
        assert link.asked == 1
        await found.forget_everywhere([kit.key(1)])
        assert link.asked == 2


async def test_values_larger_than_a_slot_arrive_in_portions(kit, opened):
    far = await opened(instance(query="capacity=16MiB"))
    near = await opened(instance(far.address, query="staging=1MiB&verify=full"))
    key = kit.key("large")
    await far.save([kit.block(key, nbytes=(3 << 20) + 5)])
    (into,) = kit.buffers(1, (3 << 20) + 5)
    assert await near.load([key], [into]) == 1
    assert kit.holds(into, key, framed=False)


async def test_one_portion_that_fails_fails_the_load(kit, opened, monkeypatch):
    far = await opened(instance(query="capacity=16MiB"))
    near = await opened(instance(far.address, query="staging=1MiB&verify=none"))
    key = kit.key("one portion")
    await far.save([kit.block(key, nbytes=3 << 20)])
    pulls = near._parts.fetcher._pulls
    run, failures = pulls.run, [True]

    async def fails_once(handle, several):
        fine = await run(handle, several)
        return fine and not (failures and failures.pop())

    monkeypatch.setattr(pulls, "run", fails_once)
    assert await near.load([key], kit.buffers(1, 3 << 20)) == 0
    assert not failures
    assert await near.load([key], kit.buffers(1, 3 << 20)) == 1


async def test_memory_is_bounded_and_what_a_peer_reads_is_not_dropped(kit, opened, monkeypatch):
    far = await opened(instance(query=f"capacity={6 * kit.frame_nbytes}"))
    near = await opened(instance(far.address))
    keys = kit.keys("leased", count=4)
    await far.save(kit.chain(keys))
    fetcher = near._parts.fetcher
    read, goes_on, granted = fetcher._read_all, asyncio.Event(), asyncio.Event()

    async def slowly(*arguments):
        granted.set()
        await goes_on.wait()
        return await read(*arguments)

    monkeypatch.setattr(fetcher, "_read_all", slowly)
    into = kit.buffers(4)
    loading = asyncio.create_task(near.load(keys, into))
    await asyncio.wait_for(granted.wait(), 60)
    later = kit.keys("later", count=6)
    saved = [await far.save([kit.block(key)]) for key in later]
    assert saved == [1, 1, 1, 1, 1, 1]  # the two free ones are used again and again
    assert (await far.stats())["bytes"] <= 6 * kit.frame_nbytes
    await far.delete(keys)  # gone for lookups; its memory stays as it is
    goes_on.set()
    assert await loading == 4
    assert all(map(kit.holds, into, keys))

    async def released():
        return not (await far.stats())["leases"]

    await eventually(released)
    assert await far.save(kit.chain(kit.keys("after", count=6))) == 6


def test_of_few_blocks_it_is_remembered_where_they_are(kit, monkeypatch):
    monkeypatch.setattr("kvconnect.backends.nixl.find._REMEMBERED", 3)
    finder, keys = NixlFinder(None, None, 1.0), kit.keys("remembered", count=9)
    finder._remember(keys, ["a link"] * 9)
    assert list(finder._known) == keys[-3:]


def test_blocks_that_are_not_granted_are_not_held(kit, monkeypatch):
    held = [SimpleNamespace(units=[0, 1], nbytes=8) for _ in range(3)]
    released, said = [], []
    region = SimpleNamespace(tensor=torch.empty(64), unit=4)
    blocks = SimpleNamespace(region=region, hold=lambda _: held, release=released.extend)
    publisher = Publisher(blocks, 0, 10.0)
    claim = ClaimKeys(seq=1, request="r", keys=tuple(kit.keys("claimed", count=3)))

    def full(*_, **__):
        raise OutOfBlocks("planted")

    monkeypatch.setattr(publisher.server, "grant_keys", full)
    publisher._grant(claim, "a reader", said.append)
    assert released == held
    assert [type(one) for one in said] == [Unknown]
    released.clear()
    monkeypatch.setattr("kvconnect.backends.nixl.publish._MAX_UNITS", 3)
    assert publisher._hold(claim) == held[:1]
    assert released == held[1:]


async def test_instances_of_one_url_leave_themselves_out(kit, opened):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
    store = await opened(instance(address, query=f"listen={address}"))
    assert (await store.stats())["peers"] == 0
    assert await store.lookup(kit.keys("self", count=2)) == 0


async def test_a_peer_that_is_gone_is_tried_rarely_until_the_store_is_used(
    kit, opened, monkeypatch
):
    monkeypatch.setattr(node, "_IDLE_AFTER_S", 0.0)
    monkeypatch.setattr(peers, "_IDLE_PAUSE_S", 90.0)
    monkeypatch.setattr(peers, "Timing", partial(Timing, first_pause_s=60, last_pause_s=60))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    near = await opened(instance(address))
    (link,) = near._parts.node.peers._links.values()
    far = await opened(instance(query=f"listen={address}"))
    keys = kit.keys("back", count=2)
    await far.save(kit.chain(keys))
    assert link.peer.attempts == 1
    assert near._parts.node.peers._longest_pause_s(link) == 90
    await near.lookup(keys)
    await eventually(partial(asyncio.to_thread, lambda: link.ready))
    assert link.peer.attempts == 2
    assert await holds(kit, near, keys)
    near._parts.node.peers._idle_after_s = 60.0
    assert near._parts.node.peers._longest_pause_s(link) == 60


async def test_opened_to_read_it_publishes_nothing(kit, opened):
    far = await opened(instance())
    near = await opened(instance(far.address), "read")
    keys = kit.keys("read only", count=2)
    await far.save(kit.chain(keys))
    assert near.address == ""
    assert await holds(kit, near, keys)


async def test_in_a_tiered_store_it_stands_between_memory_and_disk(kit, opened, tmp_path):
    def tiered(peer, name):
        nixl = quote(f"nixl://{peer}?transport=tcp&{PATIENT}", safe="")
        disk = quote(f"disk:{tmp_path / name}?capacity=8MiB", safe="")
        tiers = f"memory:,{nixl},{disk}"
        return open_backend(f"tiered:?tiers={tiers}&patience=60s")

    far = await opened(tiered("", "far"))
    address = far.inner.tiers[1].guard.inner.address
    near = await opened(tiered(address, "near"))
    keys = kit.keys("tiered", count=5)
    assert await far.save(kit.chain(keys, tokens=[1, 2])) == 5
    assert await holds(kit, near, keys)
    memory = near.inner.tiers[0]

    async def promoted():
        return await memory.lookup(keys) == 5

    await eventually(promoted)
    assert await near.inner.tiers[2].lookup(keys) == 0
    assert {child.key for child in await far.children(keys[0])} == {keys[1]}


# ------------------------------------------------------------------------------------ what is read


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 40), max_size=6),
    st.integers(1, 16),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_portions_cover_each_block_once(sizes, unit, most, chance):
    """Read as they say, blocks are what the units hold, whatever the sizes."""
    counts = [-(-size // unit) for size in sizes]
    units = chance.sample(range(200), sum(counts))
    granted = GrantKeys(
        seq=1,
        request="r",
        epoch=1,
        lease_s=1.0,
        region=0,
        unit=unit,
        sizes=tuple(sizes),
        units=tuple(units),
    )
    remote = np.random.default_rng(1).integers(0, 256, 200 * unit, np.uint8)
    blocks = [bytearray(size) for size in sizes]
    for parts in portions(granted, len(sizes), most):
        starts = np.cumsum([0, *(part.nbytes for part in parts)])
        assert 0 < starts[-1] <= most
        local = np.zeros(starts[-1], np.uint8)
        for reads in reads_of(granted, parts, 0, starts[:-1].tolist()):
            assert reads.epoch == granted.epoch
            for far, near in zip(reads.remote_offsets, reads.local_offsets, strict=True):
                local[near : near + reads.nbytes] = remote[far : far + reads.nbytes]
        for part, start in zip(parts, starts, strict=False):
            end = part.start + part.nbytes
            blocks[part.block][part.start : end] = local[start : start + part.nbytes].tobytes()
    first = 0
    for size, count, block in zip(sizes, counts, blocks, strict=True):
        own = [remote[one * unit : (one + 1) * unit] for one in units[first : first + count]]
        assert bytes(block) == b"".join(map(bytes, own))[:size]
        first += count


# ------------------------------------------------------------------------------------ the start


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nixl://host", "peer 'host': must be 'host:port'"),
        ("nixl://127.0.0.1:0", "a port from 1 to 65535"),
        ("nixl://10.0.0.1:7600", "peer: '10.0.0.1' is not a loopback.*secret_file"),
        ("nixl://?listen=0.0.0.0:7600", "listen: '0.0.0.0' is not a loopback.*secret_file"),
        ("nixl://me:secret@127.0.0.1:7600", "takes no user"),
        ("nixl://127.0.0.1:7600/0", "has no path"),
        ("nixl://?transport=rdma", "transport=rdma: unknown; "),
        ("nixl://?verify=some", "verify=some: unknown; did you mean 'sample'"),
        ("nixl://?staging=4KiB", "staging=4096: must be at least 1MiB"),
        ("nixl://?directory=s3://bucket", "directory=s3://bucket: the URL of a Redis"),
        ("nixl://?secret_file=/nowhere/at/all", "secret_file .*cannot be read"),
        ("nixl://?capcity=1GiB", "'capcity'; did you mean 'capacity'"),
    ],
)
def test_a_bad_url_says_what_is_wrong(url, message):
    with pytest.raises(ConfigurationError, match=message):
        open_backend(url)


def test_no_secret_and_no_password_is_shown(tmp_path):
    file = tmp_path / "shared"
    file.write_text("a secret that nobody sees\n")
    url = f"nixl://?listen=0.0.0.0:1&secret_file={file}"
    with pytest.raises(ConfigurationError, match=r"listen=0.0.0.0:1.*advertise"):
        open_backend(url)
    settings = NixlSettings(secret="a secret that nobody sees", directory="redis://:pw12@h")
    assert "nobody sees" not in repr(settings)
    assert "pw12" not in repr(settings)
    file.write_text("short")
    with pytest.raises(ConfigurationError, match=r"secret_file: .*at least 16"):
        open_backend(url)


async def test_a_peer_with_another_secret_is_an_error_at_the_start(kit, opened, tmp_path):
    files = [tmp_path / name for name in "ab"]
    for number, file in enumerate(files):
        file.write_text(f"{number}" * 32)
    far = await opened(instance(query=f"secret_file={files[0]}"))
    for query in (f"secret_file={files[1]}", ""):
        near = instance(far.address, query=query)
        with pytest.raises(ConfigurationError, match=f"peer {far.address}: secret: .*give both"):
            await near.open([kit.layout])
    near = await opened(instance(far.address, query=f"secret_file={files[0]}&verify=full"))
    keys = kit.keys("secret", count=2)
    await far.save(kit.chain(keys))
    assert await holds(kit, near, keys)


async def test_a_capacity_below_one_block_is_an_error_at_the_start(kit):
    store = open_backend("nixl://?transport=tcp&capacity=4KiB")
    with pytest.raises(ConfigurationError, match="capacity=4096: one block takes"):
        await store.open([kit.layout])
