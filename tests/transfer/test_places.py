"""Which connection gives way to a newcomer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.transfer.acceptor import host_of, least_useful, oldest


@dataclass(eq=False)
class One:
    host: str = "loopback"
    used_at: float | None = None


ONES = st.builds(One, st.sampled_from("abcdef"), st.none() | st.floats(0, 9))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("127.0.0.1", "127.9.9.9", True),
        ("127.0.0.1", "::1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
    ],
)
def test_addresses_that_one_host_has_count_as_one(one, other, same):
    assert (host_of(one) == host_of(other)) is same


def test_of_a_crowd_from_one_host_one_of_its_own_goes():
    honest, crowd = [One("a"), One("b")], [One("c") for _ in range(6)]
    assert oldest([*honest, *crowd]) is crowd[0]


def test_a_host_with_a_quarter_of_the_places_is_no_crowd():
    first, *others = [One(host) for host in "abbccddee"]
    assert oldest([first, *others]) is first


def test_those_that_were_never_of_use_go_first():
    used = [One(used_at=1.0), One(used_at=2.0)]
    unused = [One(), One()]
    assert least_useful([used[0], unused[0], used[1], unused[1]]) is unused[0]


def test_newcomers_have_a_quarter_of_the_places():
    """Else those that were of use once would make all others push out each other."""
    used = [One(used_at=float(at)) for at in (3, 1, 2, 4)]
    assert least_useful([*used, One()]) is used[1]
    assert least_useful(used) is used[1]


@given(st.lists(ONES, min_size=1, max_size=40))
def test_a_reader_that_was_of_use_outlives_any_number_of_idle_ones(ones):
    newest = One("a", used_at=10.0)
    here = [newest, *ones, One()]
    for _ in range(100):
        here.remove(least_useful(here))
        here.append(One("a"))
    assert newest in here
