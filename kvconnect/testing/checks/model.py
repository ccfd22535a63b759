"""Random operations of several clients, compared with a dict."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvconnect.backend import Backend
from kvconnect.keys import BlockKey
from kvconnect.testing.blocks import BlockMaker
from kvconnect.testing.check import check, demand
from kvconnect.testing.subject import Subject, Unsupported

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine

T = TypeVar("T")

_KEYS = 5
_NBYTES = 5000


class _World:
    """The clients of one example, their loop, and what must be so."""

    def __init__(self, subject: Subject, number: int, *, bounded: bool) -> None:
        self.subject = subject
        self.bounded = bounded
        self.loop = asyncio.new_event_loop()
        self.blocks = subject.blocks("model", number, bounded)
        self.keys = self.blocks.keys(count=_KEYS)
        self.present: set[BlockKey] = set()
        self.copies: set[BlockKey] = set()  # deleted, but another client may still have them
        kind = subject.bare(subject.make_backend())
        self.durable = kind.durable
        self.clients: list[Backend] = []
        for _ in range(3 if kind.shared else 1):
            self.clients.append(self.open())
        self.run(self.clients[0].delete(self.keys))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    def open(self) -> Backend:
        capacity = 4 * 8192
        made = self.subject.make_small(capacity) if self.bounded else self.subject.make_backend()
        store = self.subject.bare(made)
        self.run(store.open([BlockMaker.layout]))
        return store

    def client(self, number: int) -> Backend:
        return self.clients[number % len(self.clients)]

    def judge(self, what: str, answer: int, keys: Sequence[BlockKey]) -> None:
        most = _leading(keys, self.present | self.copies)
        demand(answer <= most, f"{what} {answer} where {most} can be")
        least = 0 if self.bounded else _leading(keys, self.present)
        demand(answer >= least, f"{what} {answer} where {least} are")

    def close(self) -> None:
        for store in self.clients:
            self.run(store.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


def _leading(keys: Sequence[BlockKey], among: set[BlockKey]) -> int:
    return next((n for n, key in enumerate(keys) if key not in among), len(keys))


def _machine(subject: Subject, *, bounded: bool) -> type[RuleBasedStateMachine]:  # noqa: C901 - one rule after the other
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

    clients = st.integers(0, 3)
    runs = st.lists(st.integers(0, _KEYS - 1), min_size=1, max_size=3)
    examples = iter(range(10**9))

    class StoreMachine(RuleBasedStateMachine):
        world: _World

        @initialize()
        def begin(self) -> None:
            self.world = _World(subject, next(examples), bounded=bounded)

        @rule(client=clients, run=runs)
        def save(self, client: int, run: list[int]) -> None:
            world = self.world
            keys = [world.keys[number] for number in run]
            blocks = [world.blocks.block(key, nbytes=_NBYTES) for key in keys]
            saved = world.run(world.client(client).save(blocks))
            world.present |= set(keys[:saved])
            demand(saved == len(keys) or bounded, f"save stored {saved} of {len(keys)} blocks")

        @rule(client=clients, run=runs)
        def lookup(self, client: int, run: list[int]) -> None:
            world = self.world
            keys = [world.keys[number] for number in run]
            found = world.run(world.client(client).lookup(keys))
            world.judge("lookup found", found, keys)

        @rule(client=clients, run=runs)
        def load(self, client: int, run: list[int]) -> None:
            world = self.world
            keys = [world.keys[number] for number in run]
            into = world.blocks.buffers(len(keys), _NBYTES)
            loaded = world.run(world.client(client).load(keys, into))
            world.judge("load filled", loaded, keys)
            for key, buffer in zip(keys[:loaded], into, strict=False):
                demand(world.blocks.holds(buffer, key, framed=False), "a loaded block is wrong")

        @rule(client=clients, run=runs)
        def delete(self, client: int, run: list[int]) -> None:
            world = self.world
            keys = [world.keys[number] for number in run]
            world.run(world.client(client).delete(keys))
            world.present -= set(keys)
            if subject.keeps_copies:
                world.copies |= set(keys)

        @rule(client=clients, chance=st.integers(0, 3))
        def reopen(self, client: int, chance: int) -> None:
            world = self.world
            if chance:  # now and then is enough: a store that is not durable starts over
                return
            at = client % len(world.clients)
            world.run(world.clients[at].close())
            world.clients[at] = world.open()
            if not world.durable:  # it may have kept what it had, all or some
                store = world.clients[at]
                world.present = {key for key in world.present if world.run(store.lookup([key]))}

        def teardown(self) -> None:
            self.world.close()

    return StoreMachine


async def _explore(subject: Subject, *, bounded: bool) -> None:
    try:
        from hypothesis import HealthCheck, Phase, settings
        from hypothesis.stateful import run_state_machine_as_test
    except ImportError:
        raise Unsupported("hypothesis is not installed") from None
    if bounded:
        subject.make_small(1 << 20)
    machine = _machine(subject, bounded=bounded)
    chosen = settings(
        max_examples=300 if subject.long else 30,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        database=None,
        # Shrinking runs the example a few hundred times; a store on a network is too slow for it.
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    await asyncio.to_thread(run_state_machine_as_test, machine, settings=chosen)


@check("model", limit_s=600)
async def random_operations(subject: Subject) -> None:
    """Random saves, loads, lookups, deletes and reopenings of up to three clients, as of a dict."""
    await _explore(subject, bounded=False)


@check("model", limit_s=600)
async def random_operations_when_full(subject: Subject) -> None:
    """The same in a store too small for all: what is found is a part of the dict, and right."""
    await _explore(subject, bounded=True)
