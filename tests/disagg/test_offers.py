"""Prompts by their name: which are handed out, and which are not going to be."""

from __future__ import annotations

import pytest

from kvconnect.connector.disagg.offers import Offers
from kvconnect.transfer.control.messages import Claim, Grant, Unknown
from kvconnect.transfer.leases.table import Mark


@pytest.fixture
def offers():
    offers = Offers(
        lambda: None, max_lease_total=100, lease_s=20.0, max_idle_s=20.0, claim_wait_s=20.0
    )
    yield offers
    offers.close()


def answer(offers):
    said = []
    offers.server.handle(Claim(seq=1, request="name"), "reader", said.append)
    (only,) = said
    return only


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
    assert offers.advance(key, Mark(16, 2), ((1,),))


def test_what_was_handed_out_and_withdrawn_is_gone(offers):
    offers.server.withdraw(offers.offer("name", tokens=16, nbytes=60))
    offers.server.reap()
    assert offers.is_gone("name")
    offers.refuse("name")
    assert not isinstance(answer(offers), Grant | Unknown)
