"""Checks a network that fails between the store and its server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvconnect.backend import Backend
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.registry import open_backend
from kvconnect.errors import ConfigurationError, RetryLater
from kvconnect.keys import BlockKey
from kvconnect.testing.blocks import BlockMaker
from kvconnect.testing.check import Violation, check, demand
from kvconnect.testing.checks.faults import (
    answer,
    answers_within,
    calls_in_time,
    opened_first,
    recovers,
)
from kvconnect.testing.faults.faulty_backend import FaultyBackend
from kvconnect.testing.faults.tcp_fault import TcpFault, garbage, longer, shorter
from kvconnect.testing.faults.tcp_proxy import TcpProxy
from kvconnect.testing.subject import Address, Subject, Unsupported


def _proxy(subject: Subject) -> TcpProxy:
    if subject.address is None:
        raise Unsupported("the subject has no `address`: there is no network to fail")
    return TcpProxy(subject.address.host, subject.address.port)


@asynccontextmanager
async def _proxied(
    subject: Subject, name: str
) -> AsyncIterator[tuple[TcpProxy, GuardedBackend, BlockMaker]]:
    """Yields a store with three blocks, whose network still works."""
    blocks = subject.blocks("network", name)
    with _proxy(subject) as proxy:
        inner = subject.bare(subject.make_via(Address(proxy.host, proxy.port)))
        async with opened_first(subject, subject.deadline_s, FaultyBackend(inner)) as store:
            keys = blocks.keys(count=3)
            await answer(store.save(blocks.chain(keys)), subject.deadline_s, "a save")
            if not proxy.accepted:
                raise Violation(
                    "make_via() made a store that does not use the address it was given"
                )
            yield proxy, store, blocks


async def _suffer(subject: Subject, name: str, fault: TcpFault) -> None:
    async with _proxied(subject, name) as (proxy, store, blocks):
        proxy.set(fault)
        await calls_in_time(store, blocks, subject.deadline_s, name)
        proxy.heal()
        await recovers(store, blocks, name, within_s=subject.patience_s)


@check("network")
async def refused(subject: Subject) -> None:
    """A server that is down: calls end in time; when it is up again the store is used again."""
    await _suffer(subject, "refused", TcpFault(refused=True))


@check("network")
async def black_hole(subject: Subject) -> None:
    """A network that swallows everything: calls end in time; later the store is used again."""
    await _suffer(subject, "black hole", TcpFault(black_hole=True))


@check("network")
async def half_open(subject: Subject) -> None:
    """Connections that the server forgot: calls end in time; later the store is used again."""
    await _suffer(subject, "half open", TcpFault(half_open=True))


@check("network")
async def frozen(subject: Subject) -> None:
    """A server that is stopped: calls end in time, also close(); later it is used again."""
    await _suffer(subject, "frozen", TcpFault(frozen=True))


@check("network")
async def one_byte_per_second(subject: Subject) -> None:
    """Answers of one byte per second: calls end in time; later the store is used again."""
    await _suffer(subject, "1 byte/s", TcpFault(bytes_per_s=1))


@check("network")
async def slow_answers(subject: Subject) -> None:
    """Answers 500 ms late: calls end in time, and late bytes reach no other call's buffer."""
    await _suffer(subject, "+500 ms", TcpFault(delay_s=0.5))


@check("network")
async def garbage_answers(subject: Subject) -> None:
    """Answers of random bytes: never a wrong block; later the store is used again."""
    await _suffer(subject, "garbage", TcpFault(rewrite=garbage(subject.seed)))


@check("network", limit_s=180)
async def wrong_length(subject: Subject) -> None:
    """Answers that are too short or too long: never a wrong block; later it is used again."""
    for after in (3, 200):
        await _suffer(subject, f"3 bytes less after {after}", TcpFault(rewrite=shorter(after, 3)))
        await _suffer(subject, f"3 bytes more after {after}", TcpFault(rewrite=longer(after, 3)))


@check("network", limit_s=120)
async def reset_anywhere(subject: Subject) -> None:
    """Connections reset at every 64 KiB of a large block: right or absent, and usable again."""
    nbytes = 512 << 10
    blocks = subject.blocks("reset")
    with _proxy(subject) as proxy:
        store = subject.bare(subject.make_via(Address(proxy.host, proxy.port)))
        await store.open([BlockMaker.layout])
        try:
            key = blocks.key()
            demand(
                await store.save([blocks.block(key, nbytes=nbytes)]) == 1, "a save stored nothing"
            )
            for after in (1, *range(65536, nbytes, 65536)):
                proxy.set(TcpFault(reset_after=after))
                (into,) = blocks.buffers(1, nbytes)
                try:
                    loaded = await asyncio.wait_for(store.load([key], [into]), subject.patience_s)
                except TimeoutError:
                    raise Violation(f"a load hangs, reset after {after} bytes") from None
                except Exception:  # noqa: BLE001 - a plain backend may raise what it likes
                    loaded = 0
                right = not loaded or blocks.holds(into, key, framed=False)
                demand(right, f"reset after {after} bytes: a wrong block was a hit")
                demand(blocks.margins_whole(into), "a load wrote outside of its buffer")
            proxy.heal()
            await _usable(store, blocks, key, nbytes, subject.patience_s)
        finally:
            await asyncio.wait_for(store.close(), subject.patience_s)


async def _usable(
    store: Backend, blocks: BlockMaker, key: BlockKey, nbytes: int, within_s: float
) -> None:
    end = time.monotonic() + within_s
    while True:
        (into,) = blocks.buffers(1, nbytes)
        try:
            await store.save([blocks.block(key, nbytes=nbytes)])
            if await store.load([key], [into]):
                break
        except Exception as error:  # noqa: BLE001 - a plain backend may raise what it likes
            demand(time.monotonic() < end, f"not usable after resets: {error!r}")
        demand(time.monotonic() < end, "not usable after resets")
        await asyncio.sleep(0.05)
    demand(blocks.holds(into, key, framed=False), "a block is wrong after resets")


@check("network")
async def unreachable_at_start(subject: Subject) -> None:
    """The `open` of a store whose server is absent reports that within the deadline."""
    with _proxy(subject) as proxy:
        proxy.set(TcpFault(refused=True))
        await _refuses(subject, proxy, "a server that is not there")
        proxy.set(TcpFault(black_hole=True))
        await _refuses(subject, proxy, "a server that does not answer")


async def _refuses(subject: Subject, proxy: TcpProxy, what: str) -> None:
    inner = subject.bare(subject.make_via(Address(proxy.host, proxy.port)))
    store = open_backend(inner, deadline_s=subject.deadline_s)
    start = time.monotonic()
    try:
        await store.open([BlockMaker.layout])
        raise Violation(f"open() of {what} raised nothing")
    except (RetryLater, ConfigurationError):
        took = time.monotonic() - start
        limit = answers_within(subject.deadline_s)
        demand(took < limit, f"open() of {what} took {took:.1f} s to say so")
    finally:
        await store.close()


@check("network")
async def close_while_frozen(subject: Subject) -> None:
    """The ``close()`` of a store returns in time with a stopped server and calls in flight."""
    async with _proxied(subject, "close frozen") as (proxy, store, blocks):
        proxy.set(TcpFault(frozen=True))
        keys = blocks.keys(count=3)
        loading = asyncio.ensure_future(store.load(keys, blocks.buffers(3)))
        await asyncio.sleep(0.05)
        start = time.monotonic()
        await store.close()
        took = time.monotonic() - start
        await asyncio.gather(loading, return_exceptions=True)
        # Draining has a deadline, and the store's own close has one.
        demand(
            took < answers_within(subject.deadline_s),
            f"close() took {took:.1f} s beside a stopped server",
        )


@check("network", limit_s=180)
async def breaker(subject: Subject) -> None:
    """Calls without a server soon fail at once; when it is up again they soon succeed."""
    async with _proxied(subject, "breaker") as (proxy, store, blocks):
        proxy.set(TcpFault(frozen=True))  # so that each call takes until its deadline
        keys = blocks.keys(count=1)
        quick = 0
        for _ in range(11):
            start = time.monotonic()
            await answer(
                store.lookup(keys), subject.deadline_s, "a lookup while the server is gone"
            )
            quick = quick + 1 if time.monotonic() - start < subject.deadline_s / 2 else 0
            if quick == 5:
                break
        demand(
            quick == 5, "a server that does not answer costs every call its time: no breaker opens"
        )
        proxy.heal()
        await recovers(store, blocks, "breaker", within_s=subject.patience_s)


@check("network")
async def restart_with_data(subject: Subject) -> None:
    """A server that restarts with its data: blocks are found again, without a new store."""
    await _restart(subject, empty=False)


@check("network")
async def restart_empty(subject: Subject) -> None:
    """A server that restarts empty: blocks are misses, and can be saved again."""
    await _restart(subject, empty=True)


async def _restart(subject: Subject, *, empty: bool) -> None:
    what = f"restart{' empty' if empty else ''}"
    blocks = subject.blocks(what)
    keys = blocks.keys(count=3)
    # No call hangs here: the check demands an answer, however busy the machine is.
    async with subject.guarded(subject.patience_s) as store:
        demand(await store.save(blocks.chain(keys)) == 3, "a save stored nothing")
        await subject.restart_server(empty=empty)
        await recovers(store, blocks, what, within_s=subject.patience_s)
        found = await store.lookup(keys)
        demand(found == (0 if empty else 3), f"after a {what}, lookup says {found}")
        demand(await store.save(blocks.chain(keys)) == 3, f"after a {what} saves store nothing")
        into = blocks.buffers(3)
        demand(await store.load(keys, into) == 3, f"after a {what} loads find nothing")
        demand(all(map(blocks.holds, into, keys)), f"after a {what} a block is wrong")
