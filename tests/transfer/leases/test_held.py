"""D's side: the own-lease rule."""

from __future__ import annotations

import time

import pytest

from kvconnect.errors import UsageError
from kvconnect.trace import metrics
from kvconnect.transfer.leases.held import HeldLease, Outcome
from kvconnect.transfer.leases.timer import MAX_DRIFT, lease_clock

LATE = "transfer.late_reads"


@pytest.fixture
def lease(clock):
    return HeldLease("r", 1, clock=clock)


@pytest.fixture
def late():
    before = metrics.snapshot().get(LATE, 0)
    return lambda: metrics.snapshot().get(LATE, 0) - before


def test_nothing_may_be_read_before_the_grant(lease):
    assert not lease.may_read()
    lease.sent(1)
    assert not lease.may_read()
    assert lease.granted(1, 10)
    assert lease.may_read()


def test_it_is_counted_from_when_the_claim_was_sent(lease, clock):
    lease.sent(1)
    clock.now += 6  # the grant took its time
    lease.granted(1, 10)
    assert lease.end == 60 - 10 * MAX_DRIFT
    clock.now = 59.8
    assert lease.may_read()
    clock.now = 59.95  # clocks differ
    assert not lease.may_read()


def test_an_answer_to_what_was_never_sent_is_none(lease):
    lease.sent(1)
    assert not lease.granted(2, 10)
    assert not lease.may_read()


def test_reads_that_end_in_time_are_valid_whatever_p_says_then(lease, late):
    lease.sent(1)
    lease.granted(1, 10)
    lease.reads_ended()
    assert lease.outcome is Outcome.VALID
    lease.refused(1, "P started anew")
    lease.give_up()
    assert lease.outcome is Outcome.VALID
    assert late() == 0


def test_reads_that_end_late_are_valid_only_if_p_says_so(lease, clock, late):
    lease.sent(1)
    lease.granted(1, 10)
    clock.now += 10
    lease.reads_ended()
    assert lease.outcome is Outcome.OPEN
    lease.release_sent(2)
    lease.released_ok(2)
    assert lease.outcome is Outcome.VALID
    assert late() == 0


@pytest.mark.parametrize("end", [lambda one: one.refused(2, "expired"), HeldLease.give_up])
def test_late_reads_are_discarded_and_counted(lease, clock, late, end):
    lease.sent(1)
    lease.granted(1, 10)
    clock.now += 10
    lease.reads_ended()
    lease.release_sent(2)
    end(lease)
    assert lease.outcome is Outcome.INVALID
    assert late() == 1
    lease.released_ok(2)
    assert lease.outcome is Outcome.INVALID


def test_an_acknowledgement_of_a_renewal_that_comes_after_the_reads_counts(lease, clock):
    lease.sent(1)
    lease.granted(1, 10)
    clock.now += 5
    lease.sent(2)
    clock.now += 6
    lease.reads_ended()
    assert lease.outcome is Outcome.OPEN
    clock.now += 100
    lease.granted(2, 10)
    assert lease.outcome is Outcome.VALID


def test_an_ok_to_another_release_is_none(lease, clock):
    lease.sent(1)
    lease.granted(1, 10)
    clock.now += 10
    lease.released_ok(2)
    lease.reads_ended()
    lease.released_ok(2)
    lease.release_sent(3)
    lease.released_ok(2)
    assert lease.outcome is Outcome.OPEN


def test_a_refusal_while_reading_ends_it(lease, late):
    lease.sent(1)
    lease.granted(1, 10)
    lease.sent(2)
    lease.refused(2, "expired")
    assert lease.lost == "expired"
    assert not lease.may_read()
    lease.reads_ended()
    assert lease.outcome is Outcome.INVALID
    assert late() == 0  # it was not read under a lease that was thought to hold


def test_a_withdrawal_leaves_what_was_granted(lease):
    lease.sent(1)
    lease.granted(1, 10)
    lease.withdrawn("aborted")
    assert lease.lost == "aborted"
    assert lease.may_read()
    lease.reads_ended()
    assert lease.outcome is Outcome.VALID


def test_renewals_are_due_every_third_and_at_once_after_a_grant_that_took_long(lease, clock):
    assert lease.renewal_due() is None
    lease.sent(1)
    assert lease.renewal_due() is None
    clock.now += 9
    lease.granted(1, 12)
    assert lease.renewal_due() == 54
    assert lease.renewal_due() < clock.now
    lease.sent(2)
    assert lease.renewal_due() == clock.now + 4
    lease.reads_ended()
    lease.release_sent(3)
    assert lease.renewal_due() is None


def test_a_release_before_the_reads_ended_is_a_bug(lease):
    with pytest.raises(UsageError, match="before its reads have ended"):
        lease.release_sent(1)
    lease.reads_ended()
    with pytest.raises(UsageError, match="have ended before"):
        lease.reads_ended()


def test_the_clock_counts_while_the_host_sleeps():
    assert abs(lease_clock() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 5


def test_what_was_acknowledged_last_was_sent_then(lease, clock):
    assert lease.confirmed < lease.now()
    lease.sent(1)
    assert lease.awaits_answer
    clock.now += 2
    lease.granted(1, 10)
    assert (lease.confirmed, lease.now(), lease.awaits_answer) == (50.0, 52.0, False)
    lease.sent(2)
    lease.sent(3)
    clock.now += 1
    lease.granted(3, 10)
    lease.granted(2, 10)
    lease.granted(1, 10)  # late answers take nothing back
    assert (lease.confirmed, lease.awaits_answer) == (52.0, False)
    lease.sent(4)
    lease.refused(4, "the lease has expired")
    assert lease.confirmed == 52.0
