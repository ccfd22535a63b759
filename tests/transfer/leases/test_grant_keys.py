"""P's answer to a claim by keys: a lease and its grant, or neither."""

from __future__ import annotations

import pytest

from kvconnect.errors import OutOfBlocks
from kvconnect.transfer.control.keyed import ClaimKeys, GrantKeys
from kvconnect.transfer.leases.server import LeaseServer

CLAIM = ClaimKeys(seq=1, request="r", keys=(b"k" * 32,))


def granted(epoch: int, lease_s: float) -> GrantKeys:
    named = {"seq": CLAIM.seq, "request": CLAIM.request, "epoch": epoch}
    return GrantKeys(**named, lease_s=lease_s, region=0, unit=10, sizes=(10,), units=(0,))


@pytest.fixture
def unpinned():
    return []


@pytest.fixture
def server(clock, unpinned):
    return LeaseServer(unpinned.extend, max_lease_total=10, lease_s=10, max_idle_s=5, clock=clock)


def test_a_grant_is_sent_with_the_seconds_of_its_lease(server, unpinned, clock):
    sent = []
    key = server.grant_keys(CLAIM, "D", sent.append, granted, nbytes=10)
    assert [(one.epoch, one.lease_s) for one in sent] == [(key.epoch, 5)]
    clock.now += 10
    server.reap()
    assert [one.key for one in unpinned] == [key]


@pytest.mark.parametrize("late_s", [6, 11], ids=["idle too long", "its offer has ended"])
def test_a_lease_that_ended_before_its_grant_is_not_granted(
    server, unpinned, clock, monkeypatch, late_s
):
    """This process can be stopped between both, so the claim is refused as if there was no room."""
    offer, sent = server.table.offer, []

    def offered_late(*args, **named):
        key = offer(*args, **named)
        clock.now += late_s
        return key

    monkeypatch.setattr(server.table, "offer", offered_late)
    with pytest.raises(OutOfBlocks, match="r: the lease ended before it was granted"):
        server.grant_keys(CLAIM, "D", sent.append, granted, nbytes=10)
    assert sent == []
    server.reap()
    assert [(one.key.request, one.nbytes) for one in unpinned] == [("r", 10)]
    monkeypatch.undo()
    server.grant_keys(CLAIM, "D", sent.append, granted, nbytes=10)  # its bytes have room again
    assert len(sent) == 1
