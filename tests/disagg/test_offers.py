"""Prompts by their name: which are handed out, and which are not going to be."""

from __future__ import annotations

import pytest

from kvconnect.connector.disagg.offers import Offers
from kvconnect.transfer.control.messages import Abort, Claim, Grant, Unknown, Watermark


@pytest.fixture
def offers():
    offers = Offers(
        lambda: None, max_lease_total=100, lease_s=20.0, max_idle_s=20.0, claim_wait_s=20.0
    )
    yield offers
    offers.server.close()


def answer(offers):
    said = []
    offers.server.handle(Claim(seq=1, request="name"), "reader", said.append)
    (only,) = said
    return only


def test_the_end_of_a_lease_is_told_before_its_blocks_are_freed():
    said = []
    offers = Offers(
        lambda: said.append("freed"),
        max_lease_total=100,
        lease_s=20.0,
        max_idle_s=20.0,
        claim_wait_s=20.0,
        forget=said.append,
    )
    key = offers.offer("name", tokens=16, nbytes=60)
    assert not offers.server.table.is_claimed(key)
    answer(offers)
    assert offers.server.table.is_claimed(key)
    offers.end(1, key)
    offers.server.table.release(key, "reader")
    offers.server.reap()
    offers.server.close()
    assert said == [key.epoch, "freed"]
    assert not offers.server.table.is_claimed(key)


def test_what_is_refused_is_gone(offers):
    offers.refuse("name")
    assert offers.is_gone("name")


@pytest.mark.parametrize("why", ["another request ended early", "no room for another request"])
def test_a_refusal_hides_no_prompt_of_that_name_that_is_handed_out(offers, why):
    key = offers.offer("name", tokens=16, nbytes=60)
    if why == "no room for another request":
        assert offers.offer("name", tokens=16, nbytes=60) is None
    else:
        offers.refuse("name")
    assert not offers.is_gone("name")
    assert isinstance(answer(offers), Grant)
    assert offers.advance(key, Watermark(tokens=16, layers=2), ((1,),))


def test_what_was_handed_out_and_withdrawn_is_gone(offers):
    offers.server.withdraw(offers.offer("name", tokens=16, nbytes=60))
    offers.server.reap()
    assert offers.is_gone("name")
    offers.refuse("name")
    assert not isinstance(answer(offers), Grant | Unknown)


@pytest.mark.parametrize("ended", ["newer", "older"])
def test_of_two_that_are_handed_out_under_one_name_either_can_be_claimed(offers, ended):
    keys = {one: offers.offer("name", tokens=16, nbytes=40) for one in ("older", "newer")}
    other = keys["older" if ended == "newer" else "newer"]
    offers.withdraw(keys[ended])
    offers.server.reap()
    assert not offers.is_gone("name")
    granted = answer(offers)
    assert (type(granted), granted.epoch) == (Grant, other.epoch)
    offers.server.handle(Abort(request="name", epoch=other.epoch), "reader", lambda _: True)
    offers.server.reap()
    assert offers.is_gone("name")


def test_a_prompt_whose_reader_had_let_go_is_gone_once_it_is_offered(offers):
    """Its lease ends with its beginning."""
    offers.server.handle(Claim(seq=1, request="name"), "reader", lambda _: True)
    offers.server.handle(Abort(request="name"), "reader", lambda _: True)
    offers.offer("name", tokens=16, nbytes=60)
    assert offers.is_gone("name")
