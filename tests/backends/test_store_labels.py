"""The figures of two stores of one process can be told apart."""

from __future__ import annotations

import threading

import pytest
from tier_store import DictTier

from kvconnect.backends import open_backend
from kvconnect.backends.guard.labels import StoreLabels, place_of
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.tiered.settings import TieredSettings
from kvconnect.backends.tiered.store import TieredBackend
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import BackendUnavailable
from kvconnect.prometheus import Snapshot
from kvconnect.trace import metrics


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("disk:///var/cache/kv?capacity=1GiB", "disk:///var/cache/kv"),
        ("redis://me:secret@host:6379/2?ttl=1d", "redis://host:6379/2"),
        ("s3://bucket/prefix?endpoint_url=http://h", "s3://bucket/prefix"),
        ("memory:?capacity=1GiB", "memory:"),
        ("tiered:?tiers=memory:,disk:/kv", "tiered:"),
    ],
)
def test_a_place_is_the_url_without_credentials_and_parameters(url: str, place: str):
    assert place_of(StoreUrl.parse(url)) == place


def shown(labels) -> tuple[str, ...]:
    return tuple(value for _, value in labels)


def test_only_stores_that_are_used_at_the_same_time_are_numbered():
    names = StoreLabels()
    first, second = names.take("A", "x:"), names.take("A", "x:")
    assert (shown(first), shown(second)) == (("A", "x:"), ("A", "x: (2)"))
    assert shown(names.take("B", "x:")) == ("B", "x:")
    names.give_back(first)
    assert names.take("A", "x:") == first
    assert shown(names.take("A", "x:")) == ("A", "x: (3)")


def test_a_store_may_be_found_forgotten_while_another_is_opened():
    """The garbage collector comes at any moment, also on a thread that holds a lock."""
    names = StoreLabels()
    forgotten = names.take("A", "x:")

    class Place(str):
        """Hashed within `take`, where memory is allocated, too."""

        __slots__ = ()

        def __hash__(self) -> int:
            names.give_back(forgotten)
            return super().__hash__()

    taking = threading.Thread(target=names.take, args=("A", Place("y:")), daemon=True)
    taking.start()
    taking.join(60)
    assert not taking.is_alive()


def test_a_process_that_opens_stores_for_ever_counts_the_last_ones_together():
    names = StoreLabels()
    for number in range(10_000):
        labels = names.take("A", f"x:{number}")
        names.give_back(labels)
    assert shown(labels) == ("A", "elsewhere")
    assert shown(names.take("A", "x:7")) == ("A", "x:7")


async def test_two_stores_of_one_class_are_counted_apart(kit):
    one, two = GuardedBackend(DictTier()), GuardedBackend(DictTier())
    unopened = GuardedBackend(DictTier())  # takes no number
    before = _calls()
    async with kit.opened(one), kit.opened(two):
        await one.lookup(kit.keys("apart", count=1))
        for _ in range(2):
            await two.lookup(kit.keys("apart", count=1))
        now = _calls()
        gauges = Snapshot.take().gauge("store.breaker_state")
    grown = {store: now[store] - before.get(store, 0) for store in now}
    assert grown["DictTier", ""] == 1
    assert grown["DictTier", "(2)"] == 2
    assert ("DictTier", "(3)") not in now
    assert {("DictTier", ""), ("DictTier", "(2)")} <= gauges.keys()
    assert unopened.place == ""


async def test_failures_and_breakers_are_told_of_the_store_they_are_of(kit):
    good, bad = DictTier(), DictTier()
    stores = [GuardedBackend(good, place="x:good"), GuardedBackend(bad, place="x:bad")]
    async with kit.opened(stores[0]), kit.opened(stores[1]):
        bad.down = True
        for _ in range(6):
            with pytest.raises(BackendUnavailable):
                await stores[1].lookup(kit.keys("fails", count=1))
        counters = {dict(labels).get("place"): told for labels, told in metrics.by_labels().items()}
        bad.recover()
    assert counters["x:bad"]["store.failure"] == 5
    assert counters["x:bad"]["store.refused"] == 1
    assert counters["x:bad"]["store.breaker.opened"] == 1
    assert not any(name in counters["x:good"] for name in ("store.failure", "store.refused"))


async def test_tiers_are_told_by_url_or_name(kit, tmp_path):
    url = f"tiered:?tiers=memory:,disk://{tmp_path}/kv%3Fcapacity=64MiB&patience=60s"
    async with kit.opened(open_backend(url)):
        by_url = set(Snapshot.take().gauge("store.breaker_state"))
    tiers = TieredBackend([DictTier(), DictTier()], TieredSettings(patience_s=60.0))
    async with kit.opened(open_backend(tiers)):
        by_name = set(Snapshot.take().gauge("store.breaker_state"))
    assert {
        ("TieredBackend", "tiered:"),
        ("MemoryBackend", "memory:"),
        ("DiskBackend", f"disk://{tmp_path}/kv"),
    } <= by_url
    assert {("TieredBackend", ""), ("DictTier", "dicttier"), ("DictTier", "dicttier2")} <= by_name


def _calls() -> dict[tuple[str, str], float]:
    return {store: told.get("store.lookup", 0) for store, told in Snapshot.take().stores()}
