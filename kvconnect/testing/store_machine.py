"""Compares random operations of several clients of a store with a dict; needs hypothesis."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvconnect.backend import Backend
from kvconnect.keys import BlockKey
from kvconnect.testing.blocks import BlockMaker
from kvconnect.testing.check import demand
from kvconnect.testing.subject import Subject

T = TypeVar("T")

_KEYS = 5
_NBYTES = 5000
_CAPACITY = 4 * 8192

_CLIENTS = st.integers(0, 3)
_RUNS = st.lists(st.integers(0, _KEYS - 1), min_size=1, max_size=3)


class StoreMachine(RuleBasedStateMachine):
    """An example of random operations: its clients, their loop, and its invariants.

    Args:
        subject: the subject under test.
        number: the number of the example, whose keys no other one uses.
        bounded: true if the store is too small for all blocks.
    """

    def __init__(self, subject: Subject, number: int, *, bounded: bool) -> None:
        super().__init__()
        self._subject = subject
        self._bounded = bounded
        self._loop = asyncio.new_event_loop()
        self._blocks = subject.blocks("model", number, bounded)
        self._keys = self._blocks.keys(count=_KEYS)
        self._present: set[BlockKey] = set()
        self._copies: set[BlockKey] = set()  # deleted, but another client may still find them
        can = subject.capabilities()
        self._durable = can.durable
        several = can.shared and not subject.opens_once
        self._clients = [self._open() for _ in range(3 if several else 1)]
        self._wait(self._clients[0].delete(self._keys))

    # ---------------------------------------------------------------- what clients do

    @rule(client=_CLIENTS, run=_RUNS)
    def save(self, client: int, run: list[int]) -> None:
        """Demands that saved blocks are present from now on; an unbounded store saves all."""
        keys = self._named(run)
        blocks = [self._blocks.block(key, nbytes=_NBYTES) for key in keys]
        saved = self._wait(self._client(client).save(blocks))
        self._present |= set(keys[:saved])
        complete = saved == len(keys) or self._bounded
        demand(complete, f"save stored {saved} of {len(keys)} blocks")

    @rule(client=_CLIENTS, run=_RUNS)
    def lookup(self, client: int, run: list[int]) -> None:
        """Demands that lookups find the blocks of the model."""
        keys = self._named(run)
        self._judge("lookup found", self._wait(self._client(client).lookup(keys)), keys)

    @rule(client=_CLIENTS, run=_RUNS)
    def load(self, client: int, run: list[int]) -> None:
        """Demands that loads fill the blocks of the model, with the right bytes."""
        keys = self._named(run)
        into = self._blocks.buffers(len(keys), _NBYTES)
        loaded = self._wait(self._client(client).load(keys, into))
        self._judge("load filled", loaded, keys)
        for key, buffer in zip(keys[:loaded], into, strict=False):
            demand(self._blocks.holds(buffer, key, framed=False), "a loaded block is wrong")

    @rule(client=_CLIENTS, run=_RUNS)
    def delete(self, client: int, run: list[int]) -> None:
        """Demands that deleted blocks are absent."""
        keys = self._named(run)
        self._wait(self._client(client).delete(keys))
        self._present -= set(keys)
        if self._subject.keeps_copies:
            self._copies |= set(keys)

    @rule(client=_CLIENTS, chance=st.integers(0, 3))
    def reopen(self, client: int, chance: int) -> None:
        """Demands that a durable store keeps its blocks; another one may keep all or some."""
        if chance:  # seldom, because a store that is not durable starts empty
            return
        at = client % len(self._clients)
        self._wait(self._clients[at].close())
        store = self._clients[at] = self._open()
        if not self._durable:
            self._present = {key for key in self._present if self._wait(store.lookup([key]))}

    def teardown(self) -> None:
        """Closes the clients and their loop."""
        for store in self._clients:
            self._wait(store.close())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    # ---------------------------------------------------------------- inside

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, 20))

    def _open(self) -> Backend:
        subject = self._subject
        made = subject.make_small(_CAPACITY) if self._bounded else subject.make_backend()
        store = subject.bare(made)
        self._wait(store.open([BlockMaker.layout]))
        return store

    def _client(self, number: int) -> Backend:
        return self._clients[number % len(self._clients)]

    def _named(self, run: Sequence[int]) -> list[BlockKey]:
        return [self._keys[number] for number in run]

    def _judge(self, what: str, answer: int, keys: Sequence[BlockKey]) -> None:
        most = _leading(keys, self._present | self._copies)
        demand(answer <= most, f"{what} {answer} where {most} can be")
        least = 0 if self._bounded else _leading(keys, self._present)
        demand(answer >= least, f"{what} {answer} where {least} are")


def _leading(keys: Sequence[BlockKey], among: set[BlockKey]) -> int:
    return next((n for n, key in enumerate(keys) if key not in among), len(keys))
