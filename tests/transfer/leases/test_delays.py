"""D and P as they are, every message late by any time or lost: what P had freed is never valid.

P frees at the very moment that it may. D renews in time, reads for as long as it takes and releases
when the last read has ended. Their clocks differ in speed. Complements `test_interleavings`, where
nobody behaves.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter

import pytest

from kvconnect.transfer.claims import LeaseClient
from kvconnect.transfer.control.messages import decode, encode
from kvconnect.transfer.leases.held import Outcome
from kvconnect.transfer.leases.server import LeaseServer

LEASE_S = 10.0
LATE_S = [0.0, 0.01, 0.5, 3.0, 5.0, 9.0, 12.0, None]
READ_S = [0.1, 3.0, 6.0, 9.5, 9.85, 9.95, 10.0, 10.05, 11.0, 14.0]
SPEEDS = [0.9951, 1.0, 1.0049]


class Simulation:
    """One request, from its offer until nothing happens any more; times are of the world."""

    def __init__(self, late, reads, speeds, cut_at=None):
        self.now = 0.0
        self.events: list = []
        self.order = itertools.count()
        self.late = itertools.cycle(late)
        self.reads = list(reads)
        self.d_speed, self.p_speed = speeds
        self.freed_at = float("inf")
        self.read_end = float("-inf")
        self.begun = False
        self.server = LeaseServer(
            self.free,
            max_lease_total=1,
            lease_s=LEASE_S,
            clock=lambda: 1e5 + self.now * self.p_speed,
        )
        self.client = LeaseClient(clock=lambda: 77 + self.now * self.d_speed)
        self.server.connected("D", self.to_d)
        self.client.connected("P", self.to_p)
        self.server.offer("r", tokens=1, nbytes=1)
        self.claimed = self.client.claim("P", "r")
        self.claimed.listener = self.changed
        if cut_at is not None:
            self.at(cut_at, self.reconnect)

    def at(self, when, what):
        heapq.heappush(self.events, (when, next(self.order), what))

    def to_p(self, message):
        return self.carry(message, lambda one: self.server.handle(one, "D", self.to_d))

    def to_d(self, message):
        return self.carry(message, lambda one: self.client.handle(one, "P"))

    def carry(self, message, deliver):
        data, late = encode(message), next(self.late)
        if late is not None:
            self.at(self.now + late, lambda: deliver(decode(data)))
        return True

    def reconnect(self):
        self.client.disconnected("P", self.to_p)
        self.client.connected("P", self.to_p)

    def free(self, ended):
        assert self.freed_at == float("inf")
        self.freed_at = self.now

    def changed(self):
        if not self.begun and self.claimed.lease.may_read():
            self.begun = True
            self.at(self.now, self.read)

    def read(self):
        if self.reads and self.claimed.lease.may_read():
            self.read_end = self.now + self.reads.pop(0)
            self.at(self.read_end, self.read)
        elif not self.reads:
            self.client.release(self.claimed)
        else:
            self.client.abort(self.claimed)

    def run(self):
        while self.now < 200:
            self.server.reap()
            renew = self.client.renew()
            p_end = self.server.table.next_end()
            steps = [self.events[0][0]] if self.events else []
            if renew is not None:
                steps.append((renew - 77) / self.d_speed)
            if p_end is not None:
                steps.append((p_end - 1e5) / self.p_speed)
            if not steps:
                break
            # A rounded time may lie just before what is due then.
            self.now = max(self.now + 1e-9, min(steps))
            while self.events and self.events[0][0] <= self.now:
                heapq.heappop(self.events)[2]()
        else:
            self.client.abort(self.claimed)
            self.now += 1000
            self.server.reap()
        return self.claimed.lease.outcome


def check(simulation: Simulation) -> None:
    if simulation.run() is Outcome.VALID:
        assert simulation.freed_at >= simulation.read_end
        assert not simulation.reads
    assert len(simulation.server.table) == 0
    assert simulation.freed_at < float("inf")


def simulations(count: int, seed: int):
    rng = random.Random(seed)
    for _ in range(count):
        yield Simulation(
            late=rng.choices(LATE_S, weights=[6, 3, 1, 1, 1, 1, 1, 2], k=rng.randint(1, 12)),
            reads=rng.choices(READ_S, k=rng.randint(1, 3)),
            speeds=rng.choices(SPEEDS, k=2),
            cut_at=rng.choice([None, rng.uniform(0, 20)]),
        )


def test_what_p_had_freed_is_never_valid_in_many_runs():
    outcomes: Counter[object] = Counter()
    for one in simulations(300, seed=1):
        check(one)
        outcomes[one.claimed.lease.outcome] += 1
        outcomes["after its own end"] += (
            one.claimed.lease.outcome is Outcome.VALID
            and one.read_end * one.d_speed + 77 >= one.claimed.lease.end
        )
    # Or it would show nothing: both decisions are taken, and the second by P's word, too.
    assert outcomes[Outcome.VALID] > 25
    assert outcomes[Outcome.INVALID] > 25
    assert outcomes["after its own end"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_what_p_had_freed_is_never_valid_in_very_many_runs(seed):
    for one in simulations(5000, seed=seed):
        check(one)
