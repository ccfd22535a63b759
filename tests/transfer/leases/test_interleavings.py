"""Whatever is delayed, lost, doubled or overtaken: nothing that P had freed is taken for valid.

D and P on clocks of their own, of different speed, with a network between them that keeps no order.
P frees the blocks of a lease when its reaper says so, at any time from then on, and writes into
them. A read sees what lies there at any one moment while it runs, D is told later that it ended.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvconnect.transfer.claimed import Claimed
from kvconnect.transfer.claims import LeaseClient
from kvconnect.transfer.control.messages import LeaseId, Watermark, decode, encode
from kvconnect.transfer.leases.held import Outcome
from kvconnect.transfer.leases.server import LeaseServer

LEASE_S = 10.0
STEPS = st.sampled_from([0.0, 0.1, 1.0, 3.0, 3.4, 5.0, 9.8, 9.95, 10.0, 10.1, 25.0])
DRIFTS = st.sampled_from([0.9951, 1.0, 1.0049])
PICKS = st.integers(0, 1 << 16)


class Transfers(RuleBasedStateMachine):
    """Requests of one D (several incarnations of P, one after the other)."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.speeds = (1.0, 1.0)
        self.to_p: list[bytes] = []
        self.to_d: list[bytes] = []
        self.freed: dict[LeaseId, float] = {}
        self.to_free: list[LeaseId] = []
        self.offered: list[LeaseId] = []
        self.claimed: list[Claimed] = []
        self.last_read: dict[int, float] = {}
        self.failed: set[int] = set()
        self.valid = 0
        self.client = LeaseClient(clock=lambda: 77 + self.now * self.speeds[0])
        self.client.connected("P", self.send_to_p)
        self.start_p()

    def start_p(self):
        self.server = LeaseServer(
            lambda ended: self.to_free.extend(one.key for one in ended),
            max_lease_total=1 << 40,
            lease_s=LEASE_S,
            clock=lambda: 1e6 + self.now * self.speeds[1],
        )
        self.server.connected("D", self.send_to_d)
        self.live: list[LeaseId] = []

    def send_to_p(self, message):
        self.to_p.append(encode(message))
        return True

    def send_to_d(self, message):
        self.to_d.append(encode(message))
        return True

    @initialize(d=DRIFTS, p=DRIFTS)
    def clocks(self, d, p):
        self.speeds = (d, p)
        self.offer("a")
        self.claim("a")
        self.all_is_heard()

    @rule(seconds=STEPS)
    def time_passes(self, seconds):
        self.now += seconds

    # ---------------------------------------------------------------- P

    @rule(request=st.sampled_from("ab"))
    def offer(self, request):
        self.offered.append(self.server.offer(request, tokens=64, nbytes=1, blocks=((1,),)))
        self.live.append(self.offered[-1])

    @rule(pick=PICKS, tokens=st.integers(1, 64))
    @precondition(lambda self: self.live)
    def compute(self, pick, tokens):
        mark = Watermark(tokens=tokens, layers=1)
        self.server.advance(self.live[pick % len(self.live)], mark, ((2,),))

    @rule(pick=PICKS)
    @precondition(lambda self: self.live)
    def p_aborts(self, pick):
        self.server.withdraw(self.live[pick % len(self.live)])

    @rule()
    def reap(self):
        """And the blocks are written to by others at once."""
        self.server.reap()
        for key in self.to_free:
            self.freed[key] = self.now
        self.to_free.clear()

    @rule()
    def p_restarts(self):
        """Its memory is gone. Reads that run fail, and so do later ones: transports see to that."""
        for key in self.live:
            self.freed.setdefault(key, self.now)
        self.failed |= {number for number, ends in self.last_read.items() if ends > self.now}
        self.to_free.clear()
        self.start_p()
        self.client.disconnected("P", self.send_to_p)
        self.client.connected("P", self.send_to_p)

    # ---------------------------------------------------------------- D

    @rule(request=st.sampled_from("ab"))
    def claim(self, request):
        if all(
            one.lease.request != request or one.lease.outcome is not Outcome.OPEN
            for one in self.claimed
        ):
            self.claimed.append(self.client.claim("P", request))

    def _open(self):
        return [
            number
            for number, one in enumerate(self.claimed)
            if one.lease.outcome is Outcome.OPEN
            and not one.lease.released
            and number not in self.failed
        ]

    @rule(pick=PICKS, takes_s=STEPS)
    def read(self, pick, takes_s):
        """Begins in time, and ends when it ends."""
        numbers = [number for number in self._open() if self.claimed[number].lease.may_read()]
        if numbers:
            number = numbers[pick % len(numbers)]
            lease = self.claimed[number].lease
            if LeaseId(request=lease.request, epoch=lease.epoch) not in self.live:
                self.failed.add(number)
                return
            ends = self.now + takes_s
            self.last_read[number] = max(self.last_read.get(number, 0), ends)

    @rule(pick=PICKS)
    def read_to_the_end(self, pick):
        """What D does: waits for its last read, and releases at once."""
        reading = [number for number in self._open() if number in self.last_read]
        if reading:
            number = reading[pick % len(reading)]
            self.now = max(self.now, self.last_read[number])
            self.client.release(self.claimed[number])

    @rule(pick=PICKS)
    def release(self, pick):
        """Once the last read has ended."""
        numbers = [
            number
            for number in self._open()
            if number in self.last_read and self.last_read[number] <= self.now
        ]
        if numbers:
            self.client.release(self.claimed[numbers[pick % len(numbers)]])

    @rule(pick=PICKS)
    @precondition(lambda self: self.claimed)
    def abort(self, pick):
        self.client.abort(self.claimed[pick % len(self.claimed)])

    @rule()
    def renew(self):
        self.client.renew()

    @rule()
    def reconnect(self):
        self.client.disconnected("P", self.send_to_p)
        self.client.connected("P", self.send_to_p)

    # ---------------------------------------------------------------- the network

    @rule(pick=PICKS, again=st.booleans())
    @precondition(lambda self: self.to_p)
    def p_hears(self, pick, again):
        at = pick % len(self.to_p)
        message = decode(self.to_p[at] if again else self.to_p.pop(at))
        self.server.handle(message, "D", self.send_to_d)

    @rule(pick=PICKS, again=st.booleans())
    @precondition(lambda self: self.to_d)
    def d_hears(self, pick, again):
        at = pick % len(self.to_d)
        message = decode(self.to_d[at] if again else self.to_d.pop(at))
        self.client.handle(message, "P")

    @rule()
    def all_is_heard(self):
        for _ in range(4):
            while self.to_p:
                self.server.handle(decode(self.to_p.pop(0)), "D", self.send_to_d)
            while self.to_d:
                self.client.handle(decode(self.to_d.pop(0)), "P")

    @rule(pick=PICKS)
    @precondition(lambda self: self.to_p or self.to_d)
    def one_is_lost(self, pick):
        several = self.to_p or self.to_d
        several.pop(pick % len(several))

    # ---------------------------------------------------------------- what must hold

    @invariant()
    def nothing_that_was_freed_is_valid(self):
        for number, one in enumerate(self.claimed):
            if one.lease.outcome is Outcome.VALID:
                key = LeaseId(request=one.lease.request, epoch=one.lease.epoch)
                assert number in self.last_read
                assert self.freed.get(key, self.now + 1) >= self.last_read[number], key

    @invariant()
    def each_lease_ends_once_and_is_counted(self):
        assert self.server.table.total_nbytes == len(self.server.table)

    def teardown(self):
        """Nothing stays pinned: a lease and some after the last word, all is given back."""
        self.now += 1000
        self.server.reap()
        assert len(self.server.table) == 0
        assert self.server.table.next_end() is None
        pinned = set(self.live) - set(self.freed) - set(self.to_free)
        assert not pinned
        assert len(self.to_free) == len(set(self.to_free))


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=40, stateful_step_count=25)


@pytest.mark.slow
class TestManyTransfers(Transfers.TestCase):
    settings = settings(max_examples=600, stateful_step_count=60)


def test_the_machine_reaches_what_it_is_about():
    """Valid by the own lease, valid by P's word, discarded as late, freed: each now and then."""
    seen = set()
    rng = random.Random(3)
    for _ in range(150):
        one = Transfers()
        one.clocks(1.0, 1.0)
        one.read(0, rng.choice([0.1, 5.0, 9.95, 10.1]))
        if rng.random() < 0.5:
            one.time_passes(3.4)
            one.renew()
            if rng.random() < 0.7:
                one.all_is_heard()
            else:
                one.to_p.clear()
        one.time_passes(rng.choice([9.8, 9.95, 10.1]))
        one.release(0)
        lease = one.claimed[0].lease
        if lease.outcome is Outcome.VALID:
            seen.add("own lease")
        if rng.random() < 0.5:
            one.time_passes(rng.choice([0.1, 3.0]))
            one.reap()
        one.all_is_heard()
        one.nothing_that_was_freed_is_valid()
        if lease.outcome is Outcome.VALID:
            seen.add("freed after" if one.freed else "P's word")
        if lease.outcome is Outcome.INVALID:
            seen.add("late")
        one.teardown()
    assert seen == {"own lease", "P's word", "freed after", "late"}
