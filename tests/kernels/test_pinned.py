"""Staging memory: aligned slots, and what is refused."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from kvconnect.errors import ConfigurationError
from kvconnect.kernels import pinned
from kvconnect.kernels.pinned import ALIGNMENT, PinnedPool

HAS_NODES = Path("/sys/devices/system/node/node0").exists()


@pytest.mark.parametrize(
    ("nbytes", "slot", "shape"),
    [
        (1, 1, (1, 4096)),
        (4097, 4096, (2, 4096)),
        (10_000, 5000, (2, 8192)),
        (24_576, 8192, (3, 8192)),
    ],
)
def test_slots_are_aligned_and_hold_at_least_what_is_asked_for(nbytes, slot, shape):
    pool = PinnedPool(nbytes, slot_nbytes=slot, pin=False)
    assert tuple(pool.slots.shape) == shape
    assert pool.memory.numel() == shape[0] * shape[1]
    assert all(row.data_ptr() % ALIGNMENT == 0 for row in pool.slots)
    pool.slots[-1].fill_(7)
    assert pool.memory[-1] == 7


def test_without_cuda_it_is_plain_memory():
    pool = PinnedPool(5000)
    assert pool.pinned == torch.cuda.is_available()
    assert pool.slots.shape == (2, 4096)
    assert not pool.memory.any()


def test_a_tensor_of_it_keeps_the_memory():
    pool = PinnedPool(8192, pin=False)
    gone = weakref.ref(pool)
    slot = pool.slots[1]
    del pool
    gc.collect()
    assert gone() is None
    slot.fill_(3)
    assert slot.sum() == 3 * 4096


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"nbytes": 0}, "nbytes: 0"),
        ({"nbytes": -5}, "nbytes: -5"),
        ({"nbytes": 8192, "slot_nbytes": 0}, "slot_nbytes: 0"),
        ({"nbytes": 8192, "numa_node": 9999}, "numa_node: 9999"),
        ({"nbytes": 8192, "numa_node": -1}, "numa_node: -1"),
        ({"nbytes": 1 << 60, "pin": False}, "nbytes: 1152921504606846976"),
    ],
)
def test_what_cannot_be_had_is_said(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        PinnedPool(**arguments)


@pytest.mark.skipif(not HAS_NODES, reason="this kernel has no NUMA nodes to choose from")
def test_a_numa_node_can_be_chosen(recwarn):
    pool = PinnedPool(1 << 20, numa_node=0, pin=False)
    pool.memory.fill_(1)
    assert pool.memory.sum() == 1 << 20


@pytest.mark.skipif(not HAS_NODES, reason="this kernel has no NUMA nodes to choose from")
def test_a_kernel_that_does_not_let_one_choose_is_warned_about(monkeypatch):
    warnings = []
    monkeypatch.setattr(pinned, "_MBIND", {})
    monkeypatch.setattr(pinned, "warn_once", lambda *words: warnings.append(words))
    assert PinnedPool(4096, numa_node=0, pin=False).memory.numel() == 4096
    assert "numa_node=0" in warnings[0][1]


class Runtime:
    """A CUDA runtime that notes what it is asked to lock."""

    def __init__(self, code=0):
        self.code = code
        self.locked = {}

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802 (CUDA's name)
        self.locked[address] = (nbytes, flags)
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802 (CUDA's name)
        del self.locked[address]


def test_it_is_locked_as_long_as_it_lives_and_no_further(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pool = PinnedPool(10_000, pin=True)
    assert runtime.locked == {pool.memory.data_ptr(): (12_288, 1)}
    slots = pool.slots
    del pool
    gc.collect()
    assert runtime.locked
    del slots
    gc.collect()
    assert not runtime.locked


def test_memory_that_cannot_be_locked_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(code=2))
    with pytest.raises(ConfigurationError, match=r"error 2.*ulimit"):
        PinnedPool(10_000, pin=True)
