"""The fetcher by itself: whatever goes wrong, each load ends once and nothing of it stays."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engines import T, until

from kvconnect.connector.disagg.fetch import fetcher as module
from kvconnect.connector.disagg.fetch.claim_book import ClaimBook
from kvconnect.connector.disagg.fetch.fetcher import Fetcher
from kvconnect.connector.disagg.fetch.load import Load
from kvconnect.connector.disagg.fetch.part import FetchSettings, Part
from kvconnect.connector.disagg.fetch.sources import Source
from kvconnect.connector.disagg.messages import FetchOrder
from kvconnect.keys import Shard
from kvconnect.layout import KvCacheLayout
from kvconnect.shards import stored_heads
from kvconnect.transfer.claimed import Claimed
from kvconnect.transfer.claims import LeaseClient
from kvconnect.transfer.control.messages import Unknown, Watermark
from kvconnect.transfer.leases.held import HeldLease
from kvconnect.transfer.pull import Pull
from kvconnect.transfer.quarantine import Quarantine
from kvconnect.transfer.reads import Reads
from kvconnect.transfer.transport import PeerHandle

LAYOUT = KvCacheLayout(2, 1, 4, 4, T, torch.float32)
SETTINGS = FetchSettings((LAYOUT,), {0: torch.empty(0)}, 20.0, 20.0, 1e6)
ORDER = FetchOrder(7, "name", "host:1", 0, 40, (0,), ([1, 2, 3],))


class FakeLinks:
    """One engine, which is never connected."""

    def __init__(self) -> None:
        self.link = SimpleNamespace(
            address="host:1", attempts=0, error=None, handle=None, hello=None, users=0
        )

    def use(self, address):
        self.link.users += 1
        return self.link

    def leave(self, link):
        link.users -= 1


@pytest.fixture
def links():
    return FakeLinks()


@pytest.fixture
def fetcher(links):
    fetcher = Fetcher(
        None,
        ClaimBook(LeaseClient(), links, stored_heads((LAYOUT,), Shard())),
        SETTINGS,
        quarantine=Quarantine(4, lambda: None),
    )
    yield fetcher
    fetcher.close()


def ends_nowhere(fetcher, links):
    """Nothing of any load is left."""
    until(lambda: not (fetcher._fetches or fetcher._expected or fetcher.claims))
    assert (links.link.users, len(fetcher.claims.client)) == (0, 0)


def test_a_prompt_is_claimed_for_one_request_until_that_lets_go_of_it(fetcher, links):
    """Also once the other side has refused: what the first drops would be the second's."""
    first = fetcher.claims.claim("host:1", "name")
    seq = next(iter(first.lease._sent))
    fetcher.claims.client.handle(Unknown(seq=seq, request="name"), "host:1")
    assert first.failed
    second = fetcher.claims.claim("host:1", "name")
    assert second.failed
    assert links.link.users == 1
    first.drop()
    second.drop()
    third = fetcher.claims.claim("host:1", "name")
    assert not third.failed
    first.drop()
    assert fetcher.claims._claims["host:1", "name"] is third
    third.drop()
    ends_nowhere(fetcher, links)


@pytest.mark.parametrize("what", ["Part", "FetchPlan"])
def test_a_load_that_cannot_begin_has_failed(fetcher, links, monkeypatch, what):
    def planted(*args, **more):
        raise ValueError("planted")

    place = module if what == "Part" else "kvconnect.connector.disagg.fetch.part"
    monkeypatch.setattr(*((place, what) if what == "Part" else (f"{place}.{what}",)), planted)
    fetcher.claims.claim("host:1", "name")
    told = []
    fetcher.expect(ORDER, lambda *one: told.append(one))
    fetcher.begin(ORDER)
    until(lambda: told)
    [(request_id, failure)] = told
    assert (failure.request_id, failure.num_valid_tokens, failure.writes_ended) == (7, 0, True)
    assert request_id == 7
    ends_nowhere(fetcher, links)


def test_a_load_is_cancelled_before_it_begins(fetcher, links):
    fetcher.claims.claim("host:1", "name")
    told = []
    fetcher.expect(ORDER, lambda *one: told.append(one))
    fetcher.cancel(7)
    fetcher.begin(ORDER)
    until(lambda: told)
    ends_nowhere(fetcher, links)
    assert told == [(7, None)]


def test_an_end_of_a_read_that_cannot_be_noted_fails_its_load(fetcher):
    """It would wait for that read until the deadline of the whole load."""

    def planted(*_):
        raise ValueError("planted")

    reasons: list[str] = []
    link = SimpleNamespace(address="host:1", handle=PeerHandle("host", "0" * 32, ()))
    part = SimpleNamespace(
        order=ORDER,
        link=link,
        arrivals=None,
        fail=reasons.append,
        pull_done=planted,
        pull_terminal=lambda _: None,
        release=lambda _: None,
    )
    transport = SimpleNamespace(pull=lambda *_, **__: pull)
    pull, fetcher._transport = Pull(1), transport
    fetcher.pull(part, Reads(0, [0], 0, [0], 1))
    pull.finish()
    until(lambda: reasons)
    assert reasons == ["ValueError('planted')"]
    assert fetcher._flying_nbytes == 0


def test_a_request_that_waits_goes_on_before_the_other_side_hears_of_it(fetcher):
    happened = []
    release = lambda _: happened.append("released")  # noqa: E731
    part = SimpleNamespace(
        order=ORDER, over=True, failed=None, nbytes=0, release=release, arrivals=None
    )
    fetcher._fetches[7] = Load(ORDER, T, lambda *one: happened.append(one), [part])
    fetcher._step(part, lambda: None)
    assert happened == [(7, None), "released"]
    assert not fetcher._fetches


class OnePart:
    """A part that still writes until it is stopped."""

    order, nbytes, arrivals = ORDER, 0, None

    def __init__(self):
        self.over, self.failed, self.writes_ended = False, None, False

    def fail(self, reason):
        self.over, self.failed, self.writes_ended = True, self.failed or reason, True

    def release(self, client):
        pass


def test_a_part_that_fails_stops_the_others_before_that_is_reported(fetcher):
    """Or the load's blocks would be kept for reads that are over."""
    told = []
    first, second = parts = [OnePart(), OnePart()]
    fetcher._fetches[7] = Load(ORDER, T, lambda _, failure: told.append(failure), parts)
    second.over = second.writes_ended = True  # a success that counts for nothing
    first.fail("planted")
    fetcher._step(first, lambda: None)
    [failure] = told
    assert (failure.reason, failure.writes_ended) == ("planted", True)
    told.clear()
    first, second = parts = [OnePart(), OnePart()]
    fetcher._fetches[7] = Load(ORDER, T, lambda _, failure: told.append(failure), parts)
    fetcher._step(second, lambda: second.fail("planted"))
    [failure] = told
    assert (failure.reason, failure.writes_ended, first.failed) == ("planted", True, "planted")
    assert not fetcher._fetches


@pytest.mark.parametrize("in_time", [True, False])
def test_what_was_read_in_time_is_valid_before_the_other_side_is_told(links, in_time):
    """And the claim is dropped after that, or the other side would hear that it was aborted."""
    clock = SimpleNamespace(now=0.0)
    lease = HeldLease("name", clock=lambda: clock.now)
    lease.sent(1)
    lease.granted(1, 10.0)
    claimed = Claimed("host:1", lease)
    happened = []

    class Client:
        def release(self, claimed):
            happened.append("told")
            return claimed.lease.outcome

    claimed.attach(links.link, lambda _: happened.append("dropped"))
    part = Part(
        FetchOrder(7, "name", "host:1", 0, 0, (0,), ([],)),
        claimed,
        links.link,
        pull=None,
        compare=None,
        settings=replace(SETTINGS, load_s=float("inf")),
        source=Source(0, 1, {}),
    )
    part.advance()
    part.release(Client())
    assert not happened  # its blocks may still go
    claimed.mark = Watermark(tokens=0, layers=0, kept=True)
    clock.now = 5.0 if in_time else 11.0
    part.advance()
    assert (part.over, part.failed, happened) == (in_time, None, [])
    part.release(Client())
    assert happened == (["told", "dropped"] if in_time else ["told"])
    assert (part.over, part.failed) == (in_time, None)
    lease.refused(1, "expired")
    part.advance()
    assert part.failed == (None if in_time else "the lease was over before the last read was")


def test_nothing_of_a_part_that_is_over_gets_into_a_block():
    """The blocks may be those of another request by then."""
    happened = []
    landing = SimpleNamespace(copy=lambda *_: happened.append("copied"))
    arrivals = SimpleNamespace(arrived=lambda _: happened.append("arrived"))
    part = SimpleNamespace(over=True, arrivals=arrivals, numbers=lambda _: np.array([0]))
    load = Load(ORDER, T, lambda *_: None)
    load.place(part, None, landing, 0)
    assert not happened
    part.over = False
    load.place(part, None, landing, 0)
    assert happened == ["copied", "arrived"]


def test_memory_of_a_read_that_failed_is_not_used_until_nothing_lands_there(fetcher, monkeypatch):
    happened, freed = [], []
    memory = SimpleNamespace(take=lambda: 3, into=lambda _, reads: reads, give_back=freed.append)
    monkeypatch.setattr(fetcher, "_landing", memory)
    monkeypatch.setattr(Load, "place", lambda *_: happened.append("placed"))
    part = SimpleNamespace(
        order=ORDER,
        link=SimpleNamespace(address="host:1", handle=PeerHandle("host", "0" * 32, ())),
        arrivals=SimpleNamespace(is_uncertain=False),
        over=False,
        failed=None,
        nbytes=0,
        writes_ended=False,
        due=lambda: time.monotonic() + 60,
        fail=happened.append,
        pull_done=lambda *_: happened.append("done"),
        pull_terminal=lambda _: None,
        release=lambda _: None,
    )
    monkeypatch.setattr(Load, "note", lambda _: None)
    fetcher._fetches[7] = Load(ORDER, T, lambda *_: None, [part])
    pull = Pull(1)
    fetcher._transport = SimpleNamespace(pull=lambda *_, **__: pull)
    fetcher.pull(part, Reads(0, [0], 0, [0], 1))
    pull.abandon()
    until(lambda: happened)
    fetcher._post(partial(happened.append, "next"))
    until(lambda: "next" in happened)
    assert (happened, freed) == (["done", "next"], [])
    pull.terminal.set()
    until(lambda: freed)
    assert freed == [3]
    del fetcher._fetches[7]
