"""Pieces and the runs that they make."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.errors import ConfigurationError
from kvconnect.transfer.reads import Reads, cut, pairs, runs


def stream(some):
    """Every offset that `some` runs read, in order."""
    return [byte for offset, nbytes in some.tolist() for byte in range(offset, offset + nbytes)]


pieces = st.integers(1, 9).flatmap(
    lambda nbytes: st.tuples(
        st.just(nbytes),
        st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=30),
    )
)


@settings(max_examples=40)
@given(pieces)
def test_runs_read_the_bytes_of_the_pieces_and_neighbours_are_one(drawn):
    nbytes, places = drawn
    far, near = np.array(places).T * nbytes
    reads = Reads(0, far, 0, near, nbytes)
    for offsets in (far, near):
        found = runs(offsets, nbytes)
        assert stream(found) == [int(o) + i for o in offsets for i in range(nbytes)]
        assert (found["offset"][1:] != (found["offset"] + found["nbytes"])[:-1]).all()
    remote, local = pairs(reads)
    assert stream(remote) == stream(runs(far, nbytes))
    assert stream(local) == stream(runs(near, nbytes))
    assert (remote["nbytes"] == local["nbytes"]).all()


@settings(max_examples=40)
@given(pieces, st.data())
def test_a_cut_is_a_part_of_the_stream(drawn, data):
    nbytes, places = drawn
    whole = runs(np.array(places)[:, 0] * nbytes, nbytes)
    total = nbytes * len(places)
    begin = data.draw(st.integers(0, total - 1))
    end = data.draw(st.integers(begin + 1, total))
    assert stream(cut(whole, begin, end)) == stream(whole)[begin:end]
    assert stream(whole) == stream(runs(np.array(places)[:, 0] * nbytes, nbytes))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"remote_region": -1}, "remote_region=-1"),
        ({"nbytes": 0}, "nbytes=0"),
        ({"remote_offsets": [0, 1]}, "remote_offsets has 2 pieces and local_offsets 1"),
        ({"local_offsets": [-4]}, "local_offsets has -4"),
        ({"local_offsets": [0.5]}, "local_offsets has shape.*float64"),
        ({"local_offsets": [[0]]}, "local_offsets has shape"),
    ],
)
def test_wrong_reads_are_refused(changed, message):
    right = {
        "remote_region": 0,
        "remote_offsets": [0],
        "local_region": 0,
        "local_offsets": [0],
        "nbytes": 4,
    }
    Reads(**right)
    with pytest.raises(ConfigurationError, match=message):
        Reads(**(right | changed))
