"""What is read beside computing: where it lands, what is certain, and what it may overwrite."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.connector.disagg.fetch.arrivals import Arrivals
from kvconnect.connector.disagg.fetch.landing import Landing
from kvconnect.connector.disagg.fetch.load import Load
from kvconnect.connector.disagg.fetch.pieces import FetchPlan, RemoteBlocks, cut_reads
from kvconnect.connector.disagg.messages import FetchOrder
from kvconnect.keys import Shard
from kvconnect.layout import KvCacheLayout
from kvconnect.shards import HeadSlice
from kvconnect.transfer.control.messages import NOTHING_COMPUTED, Watermark
from kvconnect.transfer.leases.held import HeldLease
from kvconnect.transfer.reads import Reads

T = 16
LAYERS = 4
LAYOUT = KvCacheLayout(LAYERS, 1, 4, 4, T, torch.float32)
NUM_BLOCKS = 10
IDS = [7, 3, 11, 5, 4, 9, 2, 6, 8, 1]
ORDER = FetchOrder(1, "name", "host:1", 2 * T, 12 * T - 3, (2,), (IDS,), overlaps=True)
REMOTE = [RemoteBlocks(5, 0, tuple(range(100, 112)), LAYOUT)]
HEADS = {0: HeadSlice(Shard(), slice(0, 1), slice(0, 1))}


class Peer:
    """The other engine, as a part sees it."""

    def __init__(self) -> None:
        self.now = 10.0
        self.lease = HeldLease("name", 1, clock=lambda: self.now)
        self.claim = SimpleNamespace(lease=self.lease, mark=NOTHING_COMPUTED)
        self.plan = FetchPlan(ORDER, (LAYOUT,), (0,), HEADS)
        self.arrivals = Arrivals(ORDER, self.plan, self.claim)
        self.known = NOTHING_COMPUTED
        self._seq = 0
        self.lease.sent(0)
        self.lease.granted(0, 100.0)

    def computes(self, tokens: int, layers: int = LAYERS, *, kept: bool = False) -> list[Reads]:
        mark = Watermark(tokens=tokens, layers=layers, kept=kept)
        self.claim.mark = mark
        self.known = mark.after(self.known)
        return self.arrivals.take(self.known, REMOTE)

    def arrives(self, reads: list[Reads]) -> None:
        self.now += 1
        for one in reads:
            self.arrivals.arrived(one)

    def confirms(self) -> None:
        self.now += 1
        self._seq += 1
        self.lease.sent(self._seq)
        self.lease.granted(self._seq, 100.0)

    def brings(self, reads: list[Reads]) -> tuple[int, int]:
        self.arrives(reads)
        self.confirms()
        return self.arrivals.certain()


def test_what_is_read_from_the_front_is_certain_after_the_next_answer():
    peer = Peer()
    peer.arrives(peer.computes(5 * T))
    assert peer.arrivals.is_uncertain
    assert peer.arrivals.certain() == (0, NUM_BLOCKS)
    peer.confirms()
    assert not peer.arrivals.is_uncertain
    assert peer.arrivals.certain() == (3, NUM_BLOCKS)


def test_an_answer_to_what_was_sent_before_the_read_is_none():
    peer = Peer()
    reads = peer.computes(5 * T)
    peer.lease.sent(9)
    peer.arrives(reads)
    peer.lease.granted(9, 100.0)
    assert peer.arrivals.certain() == (0, NUM_BLOCKS)


def test_blocks_that_are_kept_are_certain_while_the_lease_holds():
    peer = Peer()
    peer.arrives(peer.computes(5 * T))
    reads = peer.computes(12 * T, kept=True)
    assert peer.arrivals.certain() == (3, NUM_BLOCKS)
    peer.now = peer.lease.end + 1
    peer.arrives(reads)
    assert peer.arrivals.certain() == (3, NUM_BLOCKS)


def test_a_block_of_which_some_layers_have_come_is_not_certain():
    peer = Peer()
    assert peer.brings(peer.computes(5 * T, layers=2)) == (0, NUM_BLOCKS)
    assert peer.brings(peer.computes(5 * T)) == (3, NUM_BLOCKS)


def test_a_finished_prompt_comes_from_its_end_after_what_was_begun():
    peer = Peer()
    peer.brings(peer.computes(5 * T, layers=2))
    begun = peer.computes(12 * T, kept=True)
    assert {int(n) for one in begun for n in peer.plan.numbers(one)} == {0, 1, 2}
    assert peer.brings(begun) == (3, NUM_BLOCKS)
    for last in range(NUM_BLOCKS - 1, 3, -1):
        reads = peer.arrivals.take(peer.known, REMOTE)
        assert peer.brings(reads) == (3, last)
    assert not peer.arrivals.all_here
    assert peer.brings(peer.arrivals.take(peer.known, REMOTE)) == (NUM_BLOCKS, 0)
    assert peer.arrivals.all_here


def test_computed_blocks_are_not_read():
    peer = Peer()
    peer.arrivals.raise_floor(8)
    reads = peer.computes(12 * T)
    assert {int(n) for one in reads for n in peer.plan.numbers(one)} == {8, 9}
    assert peer.brings(reads) == (NUM_BLOCKS, 0)
    assert peer.arrivals.all_here


def test_reads_that_run_into_computed_blocks_are_not_waited_for():
    peer = Peer()
    peer.computes(5 * T)
    peer.arrivals.raise_floor(3)
    assert peer.brings(peer.computes(12 * T, kept=True)) == (3, NUM_BLOCKS - 1)
    for _ in range(6):
        peer.brings(peer.arrivals.take(peer.known, REMOTE))
    assert peer.arrivals.all_here
    assert peer.arrivals.certain() == (NUM_BLOCKS, 0)


@given(st.data())
def test_every_piece_lands_in_its_place_unless_it_is_computed(data):
    pool = torch.zeros((13, *LAYOUT.flat_shape(1)[1:]), dtype=LAYOUT.dtype)
    memory = Landing.memory_for([pool], LAYOUT.block_nbytes)
    landing = Landing(memory, 1, {0: pool})
    peer = Peer()
    load = Load(ORDER, T, lambda *_: None)
    part = SimpleNamespace(over=False, arrivals=peer.arrivals, numbers=peer.plan.numbers)
    load.parts.append(part)
    floor = data.draw(st.integers(0, NUM_BLOCKS))
    kept = data.draw(st.booleans())
    before = peer.computes(data.draw(st.integers(0, 12 * T)), data.draw(st.integers(1, LAYERS)))
    load.raise_floor((2 + floor) * T)
    reads = [*before, *peer.computes(12 * T, kept=kept)]
    while not peer.plan.complete:
        reads += peer.arrivals.take(peer.known, REMOTE)
    for one in reads:
        for piece in cut_reads(one, landing.slot_nbytes):
            slot = landing.take()
            landed = landing.into(slot, piece)
            begin, end = int(landed.local_offsets[0]), int(landed.local_offsets[-1]) + piece.nbytes
            assert landed.local_region == 1
            memory[begin:end] = 1
            load.place(part, piece, landing, slot)
            landing.give_back(slot)
    written = (pool.view(torch.uint8) == 1).reshape(13, -1)
    for number, block in enumerate(IDS):
        assert bool(written[block].all()) == (number >= floor)
        assert bool(written[block].any()) == (number >= floor)
    assert not written[[0, 10, 12]].any()
    assert landing.num_free == 16


@pytest.mark.parametrize("nbytes", [24, 7])
def test_pieces_of_any_size_land(nbytes):
    pool, memory = torch.zeros(1000, dtype=torch.uint8), torch.zeros(1600, dtype=torch.uint8)
    landing = Landing(memory, 1, {0: pool})
    offsets = np.array([5, 40, 3 * nbytes + 100])
    reads = Reads(9, offsets, 0, offsets, nbytes)
    slot = landing.take()
    begin = int(landing.into(slot, reads).local_offsets[0])
    memory[begin : begin + 3 * nbytes] = torch.arange(1, 3 * nbytes + 1, dtype=torch.uint8)
    landing.copy(slot, reads, np.array([True, False, True]))
    assert pool[5 : 5 + nbytes].tolist() == list(range(1, nbytes + 1))
    assert pool[40 : 40 + nbytes].tolist() == [0] * nbytes
    last = int(offsets[2])
    assert pool[last : last + nbytes].tolist() == list(range(2 * nbytes + 1, 3 * nbytes + 1))
    assert int((pool > 0).sum()) == 2 * nbytes


def test_no_slot_is_taken_twice():
    memory = torch.zeros(1600, dtype=torch.uint8)
    landing = Landing(memory, 1, {0: torch.zeros(8, dtype=torch.uint8)})
    slots = [landing.take() for _ in range(16)]
    assert sorted(slots) == list(range(16))
    assert landing.take() is None
    landing.give_back(slots[3])
    assert landing.take() == slots[3]
