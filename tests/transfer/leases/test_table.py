"""P's side: what is pinned, until when, and who may still read."""

from __future__ import annotations

import pytest

from kvconnect.errors import ConfigurationError, OutOfBlocks
from kvconnect.transfer.control.messages import LeaseId, Watermark
from kvconnect.transfer.leases.table import LeaseTable, Verdict

BLOCKS = ((1, 2, 3), (7,))


@pytest.fixture
def table(clock):
    return LeaseTable(max_lease_total=100, lease_s=10, max_idle_s=60, clock=clock)


def offer(table, request="r", nbytes=10) -> LeaseId:
    return table.offer(request, tokens=50, nbytes=nbytes, blocks=BLOCKS)


def ended(table) -> list[tuple[LeaseId, str]]:
    return [(one.key, one.why) for one in table.take_ended()]


def test_a_claim_is_granted_with_all_that_is_known(table):
    key = offer(table)
    table.advance(key, Watermark(tokens=32, layers=2))
    answer = table.claim("r", "D")
    assert answer.verdict is Verdict.OK
    assert (answer.epoch, answer.tokens, answer.blocks) == (key.epoch, 50, BLOCKS)
    assert answer.mark == Watermark(tokens=32, layers=2)
    assert answer.lease_s == 10


def test_an_offer_that_nobody_claims_expires(table, clock):
    key = offer(table)
    assert table.next_end() == clock.now + 10
    clock.now += 9.9
    assert ended(table) == []
    clock.now += 0.1
    assert ended(table) == [(key, "expired")]
    assert ended(table) == []
    assert table.claim("r", "D", epoch=key.epoch).verdict is Verdict.EXPIRED
    assert len(table) == table.total_nbytes == 0
    assert table.next_end() is None


def test_progress_keeps_an_offer_open(table, clock):
    key = offer(table)
    for step in range(5):
        clock.now += 9
        assert table.advance(key, Watermark(tokens=step + 1, layers=0)) == []
    assert table.claim("r", "D").verdict is Verdict.OK


def test_another_readers_lease_does_not_mend_a_broken_one(table, clock):
    key = offer(table)
    table.claim("r", "D", readers=2)
    clock.now += 5
    table.claim("r", "E", readers=2)
    clock.now += 6
    assert ended(table) == []
    assert table.release(key, "D") is Verdict.EXPIRED
    assert table.release(key, "E") is Verdict.OK


def test_one_whose_lease_ended_gets_none_while_another_reads(table, clock):
    key = offer(table)
    for holder in "ABCD":
        table.claim("r", holder, readers=4)
    table.release(key, "A")
    table.abort("r", "B")
    clock.now += 5
    table.renew(key, "D")
    clock.now += 6
    for holder in "ABC":
        assert table.claim("r", holder).verdict is Verdict.EXPIRED
        assert table.renew(key, holder).verdict is Verdict.EXPIRED
    assert table.renew(key, "D").verdict is Verdict.OK


def test_it_stays_until_all_readers_have_released(table):
    key = offer(table)
    for holder in "ABC":
        table.claim("r", holder, readers=3)
    for holder in "AB":
        assert table.release(key, holder) is Verdict.OK
        assert ended(table) == []
    assert table.release(key, "C") is Verdict.OK
    assert ended(table) == [(key, "released")]


def test_a_reader_that_is_to_come_is_waited_for_as_long_as_the_offer_lasts(table, clock):
    key = offer(table)
    table.claim("r", "A", readers=2)
    table.release(key, "A")
    assert ended(table) == []
    clock.now += 10
    assert ended(table) == [(key, "expired")]


def test_a_release_is_answered_alike_when_it_comes_twice(table):
    key = offer(table)
    table.claim("r", "D")
    assert table.release(key, "D") is Verdict.OK
    assert table.release(key, "D") is Verdict.OK
    table.take_ended()
    assert table.release(key, "D") is Verdict.OK
    assert table.claim("r", "D", epoch=key.epoch).verdict is Verdict.EXPIRED


def test_an_abort_unpins_at_once_also_before_the_claim(table):
    claimed, unclaimed = offer(table, "a"), offer(table, "b")
    table.claim("a", "D")
    table.abort("a", "D", claimed.epoch)
    table.abort("b", "D")
    assert ended(table) == [(claimed, "aborted"), (unclaimed, "aborted")]
    assert table.release(claimed, "D") is Verdict.EXPIRED


def test_an_abort_takes_nothing_from_another_reader(table):
    key = offer(table)
    table.claim("r", "D")
    table.claim("r", "E")
    table.abort("r", "D")
    assert ended(table) == []
    assert table.release(key, "E") is Verdict.OK


def test_what_is_withdrawn_stays_for_its_readers_and_for_nobody_else(table, clock):
    key = offer(table)
    table.claim("r", "D")
    assert table.withdraw(key) == ["D"]
    assert table.claim("r", "E").verdict is Verdict.EXPIRED
    assert table.renew(key, "D").verdict is Verdict.EXPIRED
    clock.now += 9
    assert ended(table) == []
    assert table.release(key, "D") is Verdict.OK


def test_what_is_withdrawn_unclaimed_ends_at_once(table):
    key = offer(table)
    assert table.withdraw(key) == []
    assert ended(table) == [(key, "aborted")]
    assert table.withdraw(key) == []


def test_memory_is_bounded_until_it_is_really_unpinned(table, clock):
    key = offer(table, "a", nbytes=60)
    with pytest.raises(OutOfBlocks, match="max_lease_total: 60 of 100 bytes are leased, 41 more"):
        offer(table, "b", nbytes=41)
    assert table.claim("b", "D").verdict is Verdict.UNKNOWN
    table.abort("a", "D", key.epoch)
    with pytest.raises(OutOfBlocks):
        offer(table, "b", nbytes=41)  # not taken yet: the blocks are still pinned
    table.take_ended()
    offer(table, "b", nbytes=41)
    assert table.total_nbytes == 41


def test_one_that_renews_for_ever_does_not_pin_for_ever(table, clock):
    key = offer(table)
    table.claim("r", "D")
    began, granted = clock.now, []
    while (answer := table.renew(key, "D")).verdict is Verdict.OK:
        granted.append(answer.lease_s)
        clock.now += 4
    assert clock.now - began == 60
    assert granted[0] == 10
    assert granted[-1] == 4
    assert ended(table) == [(key, "expired")]


def test_epochs_of_one_request_are_apart(table):
    first, second = offer(table), offer(table)
    assert first != second
    assert table.claim("r", "D").epoch == second.epoch
    assert table.claim("r", "D", epoch=first.epoch).verdict is Verdict.OK
    assert table.release(first, "D") is Verdict.OK
    assert [key for key, _ in ended(table)] == [first]


@pytest.mark.parametrize("read_by", [None, "E"])
def test_what_is_withdrawn_hides_no_older_offer_of_that_name(table, read_by):
    first, second = offer(table), offer(table)
    if read_by:
        table.claim("r", read_by)
    table.withdraw(second)
    answer = table.claim("r", "D")
    assert (answer.verdict, answer.epoch) == (Verdict.OK, first.epoch)
    table.abort("r", "D")
    assert first in [key for key, _ in ended(table)]


def test_an_offer_that_expired_hides_no_older_one_of_that_name(table, clock):
    first, _ = offer(table), offer(table)
    clock.now += 9
    table.advance(first, Watermark(tokens=16, layers=0))
    clock.now += 9
    assert table.claim("r", "D").epoch == first.epoch


def test_epochs_of_two_incarnations_are_apart(clock):
    tables = [LeaseTable(max_lease_total=1, clock=clock) for _ in range(2)]
    first, second = (offer(table, nbytes=1) for table in tables)
    assert first.epoch != second.epoch
    assert tables[1].claim("r", "D", epoch=first.epoch).verdict is Verdict.UNKNOWN
    assert tables[1].renew(first, "D").verdict is Verdict.UNKNOWN
    assert tables[1].release(first, "D") is Verdict.UNKNOWN


def test_only_a_holder_renews_and_releases(table):
    key = offer(table)
    assert table.renew(key, "D").verdict is Verdict.UNKNOWN
    assert table.release(key, "D") is Verdict.UNKNOWN
    assert ended(table) == []


def test_blocks_and_progress_are_added(table):
    key = table.offer("r", tokens=50, nbytes=10)
    table.claim("r", "D")
    assert table.num_blocks(key) == ()
    assert table.advance(key, Watermark(tokens=16, layers=1), ((1,), (5,))) == ["D"]
    assert table.advance(key, Watermark(tokens=32, layers=0), ((2, 3), ())) == ["D"]
    table.advance(key, Watermark(tokens=16, layers=9))  # an earlier one, late
    answer = table.renew(key, "D")
    assert answer.blocks == ((1, 2, 3), (5,))
    assert answer.mark == Watermark(tokens=32, layers=0)
    assert table.num_blocks(key) == (3, 1)


def test_progress_of_what_ended_is_for_p_alone(table, clock):
    key = offer(table)
    clock.now += 10
    assert table.advance(key, Watermark(tokens=1, layers=0)) is None
    assert table.num_blocks(key) == ()


def test_what_is_remembered_is_bounded(clock, monkeypatch):
    monkeypatch.setattr("kvconnect.transfer.leases.table._REMEMBERED", 40)
    table = LeaseTable(max_lease_total=10, clock=clock)
    for _ in range(60):
        table.abort("r", "D", offer(table, "r", nbytes=1).epoch)
        assert len(table.take_ended()) == 1
    assert len(table._past) <= 40
    assert not table._offers
    for number in range(60):
        table.abort(str(number), "D", offer(table, str(number), nbytes=1).epoch)
        assert len(table.take_ended()) == 1
    assert len(table._gone) <= 40


def test_holders_are_bounded_of_a_lease_and_of_those_that_are_over(clock, monkeypatch):
    """As a peer has it that says another name of itself each time that it connects."""
    monkeypatch.setattr("kvconnect.transfer.leases.table._REMEMBERED_HOLDERS", 600)
    table = LeaseTable(max_lease_total=10, clock=clock)
    for _ in range(4):
        key = offer(table, "r", nbytes=1)
        for number in range(256):
            assert table.claim("r", f"D{number}").verdict is Verdict.OK
        assert table.claim("r", "another").verdict is Verdict.EXPIRED
        table.abort("r", "another", key.epoch)
        assert table.renew(key, "D0").verdict is Verdict.OK
        assert len(table._live[key].holders) == 256
        clock.now += 20
        assert len(table.take_ended()) == 1
    assert [len(one) for one in table._past.values()] == [256, 256]


def test_changes_are_told_with_no_lock_held(clock):
    told = []
    table = LeaseTable(max_lease_total=10, clock=clock, changed=lambda: told.append(len(table)))
    key = offer(table)
    table.claim("r", "D")
    table.release(key, "D")
    assert told == [1, 1]


@pytest.mark.parametrize("name", ["lease_s", "max_lease_total", "max_idle_s"])
def test_numbers_that_cannot_be_are_named(name):
    with pytest.raises(ConfigurationError, match=f"{name}: 0 must be greater"):
        LeaseTable(**{"max_lease_total": 1, name: 0})
