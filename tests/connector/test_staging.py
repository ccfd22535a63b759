"""Staging memory: a fixed number of aligned slots; neither direction takes them all."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref

import pytest
import torch

from kvconnect import frame
from kvconnect.connector.data import Direction
from kvconnect.connector.io.staging import StagingPool, clear_beyond
from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout

PAYLOAD = 5000
SLOT = frame.frame_nbytes(PAYLOAD)
LOAD, SAVE = Direction.LOAD, Direction.SAVE


def test_slots_are_aligned_and_hold_a_frame() -> None:
    pool = StagingPool(10 * SLOT + 7, PAYLOAD)
    assert pool.num_slots == 10
    assert pool.region.numel() <= 10 * SLOT + 7
    for slot in pool.take(LOAD, 10):
        room = pool.frame(slot)
        assert room.data_ptr() == pool.region.data_ptr() + slot * SLOT
        assert room.data_ptr() % frame.ALIGNMENT == 0
        assert room.numel() == SLOT
        assert torch.equal(pool.frame(slot, 100), room[: frame.frame_nbytes(100)])


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (2, 2), (4, 3), (100, 75)])
def test_a_direction_leaves_a_quarter_to_the_other(slots: int, most: int) -> None:
    pool = StagingPool(slots * SLOT, PAYLOAD)
    assert len(pool.take(SAVE, 1000)) == most
    assert pool.take(SAVE, 1) == []
    assert len(pool.take(LOAD, 1000)) == slots - most


def test_the_slot_used_last_is_handed_out_first() -> None:
    pool = StagingPool(8 * SLOT, PAYLOAD)
    first = pool.take(LOAD, 3)
    pool.give_back(LOAD, first[1:2])
    assert pool.take(LOAD, 1) == first[1:2]


def test_no_slot_is_given_out_twice() -> None:
    pool = StagingPool(8 * SLOT, PAYLOAD)
    taken = pool.take(LOAD, 6) + pool.take(SAVE, 6)
    assert len(set(taken)) == len(taken) == 8


def test_waiting_for_a_slot_ends_when_one_is_given_back() -> None:
    pool = StagingPool(SLOT, PAYLOAD)
    [slot] = pool.take(SAVE, 1)
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.extend(pool.take_within(SAVE, 60)))
    waiter.start()
    pool.give_back(SAVE, [slot])
    waiter.join(60)
    assert len(got) == 1


def test_waiting_for_a_slot_ends_without_one_in_time() -> None:
    pool = StagingPool(SLOT, PAYLOAD)
    pool.take(LOAD, 1)
    assert pool.take_within(SAVE, 0.01) == []


class Listener:
    def __init__(self, pool: StagingPool) -> None:
        self.pool = pool
        self.heard: list[int] = []
        pool.on_free(self.freed)

    def freed(self) -> None:
        self.heard.append(self.pool.num_free)


def test_listeners_hear_of_free_slots() -> None:
    pool = StagingPool(SLOT, PAYLOAD)
    listener = Listener(pool)
    pool.give_back(LOAD, pool.take(LOAD, 1))
    assert listener.heard == [1]


def test_slots_may_be_freed_after_their_listeners() -> None:
    """A store that is stuck when its engine is closed frees them later."""
    pool = StagingPool(SLOT, PAYLOAD)
    first, second = Listener(pool), Listener(pool)
    gone = weakref.ref(first)
    del first
    assert gone() is None
    pool.give_back(LOAD, pool.take(LOAD, 1))
    assert second.heard == [1]


RESIDENT = """
import os
from pathlib import Path

from kvconnect.connector.io.staging import StagingPool


def resident_nbytes():
    fields = Path("/proc/self/statm").read_text(encoding="utf-8").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


pool = StagingPool(64 << 20, 1 << 20)
before = resident_nbytes()
pool.touch(16)
print(resident_nbytes() - before)
"""


def test_pages_of_the_slots_that_are_used_first_are_put_in_place() -> None:
    """In a process of its own: an allocator may give memory that is resident already."""
    grew = int(
        subprocess.run([sys.executable, "-c", RESIDENT], stdout=subprocess.PIPE, check=True).stdout
    )
    assert grew > 15 << 20


def test_slots_that_are_touched_stay_free_and_those_in_use_as_they_are() -> None:
    pool = StagingPool(64 << 20, 1 << 20)
    pool.touch(16)
    assert pool.num_free == pool.num_slots
    assert pool.take(LOAD, 16) == list(range(16))
    held = [pool.frame(slot).fill_(7) for slot in pool.take(LOAD, 2)]
    pool.touch(100)  # none that is used
    assert all(bool((one == 7).all()) for one in held)


def test_less_than_one_slot_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=f"one block takes {SLOT} bytes"):
        StagingPool(SLOT - 1, PAYLOAD)


@pytest.mark.parametrize(
    "layout",
    [KvCacheLayout(2, 2, 3, 3, 4, torch.float32), KvCacheLayout(2, 2, 5, 3, 4, torch.float64),
     KvCacheLayout(3, 1, 4, 0, 8, torch.bfloat16)],
)  # fmt: skip
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_clearing_spares_the_tokens_that_count(layout: KvCacheLayout, num_tokens: int) -> None:
    payload = torch.full((layout.block_nbytes,), 1, dtype=torch.uint8)
    clear_beyond(payload, layout, num_tokens)
    kept = layout.token_nbytes * num_tokens
    assert int(payload.sum()) == kept
    planes = payload.view(layout.dtype).view(layout.num_layers * layout.kv_factor, -1)
    if layout.value_dim in (0, layout.key_dim):
        assert (planes[:, : planes.shape[1] * num_tokens // layout.tokens_per_block] != 0).all()
    else:
        keys = planes[:, : layout.tokens_per_block * layout.num_kv_heads * layout.key_dim]
        values = planes[:, keys.shape[1] :]
        for part in (keys, values):
            assert (part[:, : part.shape[1] * num_tokens // layout.tokens_per_block] != 0).all()
