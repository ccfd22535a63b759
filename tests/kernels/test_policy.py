"""Which way a copy takes, and how that is found out."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvconnect.errors import ConfigurationError
from kvconnect.kernels.cuda.calibrate import SIZES, find_thresholds
from kvconnect.kernels.cuda.copy_policy import CopyPolicy, Direction, Route
from kvconnect.kernels.policy import calibrate, capabilities

KIB = 1024


@pytest.mark.parametrize(
    ("direction", "run_nbytes", "route"),
    [
        (Direction.WITHIN, 1, Route.KERNEL),
        (Direction.WITHIN, 1 << 30, Route.KERNEL),
        (Direction.LOAD, 28 * KIB - 1, Route.KERNEL),
        (Direction.LOAD, 28 * KIB, Route.DMA),
        (Direction.STORE, 64 * KIB - 1, Route.STAGED),
        (Direction.STORE, 64 * KIB, Route.DMA),
    ],
)
def test_the_default_policy_is_that_of_the_specification(direction, run_nbytes, route):
    assert CopyPolicy().choose(direction, run_nbytes) is route


@pytest.mark.parametrize("field", ["load_dma_from", "host_ctas", "num_slots"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_policy_of_nonsense_is_refused_by_name(field, value):
    with pytest.raises(ConfigurationError, match=field):
        CopyPolicy(**{field: value})


def fake_seconds(load_from, store_from):
    """DMA wins from these sizes on."""

    def seconds(direction, route, run_nbytes):
        wins = load_from if direction is Direction.LOAD else store_from
        if route is Route.DMA:
            return 1.0
        assert route is (Route.KERNEL if direction is Direction.LOAD else Route.STAGED)
        return 1.5 if run_nbytes >= wins else 0.5

    return seconds


@pytest.mark.parametrize(("load_from", "store_from"), [(16 * KIB, 96 * KIB), (SIZES[0], SIZES[-1])])
def test_calibration_finds_where_dma_begins_to_win(load_from, store_from):
    before = CopyPolicy(host_ctas=3)
    found = find_thresholds(before, fake_seconds(load_from, store_from))
    assert (found.load_dma_from, found.store_dma_from) == (load_from, store_from)
    assert found.host_ctas == 3


def test_where_dma_never_wins_it_is_kept_for_sizes_that_were_not_tried():
    found = find_thresholds(CopyPolicy(), fake_seconds(1 << 40, 1 << 40))
    assert found.load_dma_from == found.store_dma_from == 2 * SIZES[-1]


def test_one_size_at_which_dma_wins_by_chance_does_not_count():
    def seconds(direction, route, run_nbytes):
        fast = run_nbytes >= 64 * KIB or run_nbytes == 8 * KIB
        return (0.5 if fast else 2.0) if route is Route.DMA else 1.0

    assert find_thresholds(CopyPolicy(), seconds).load_dma_from == 64 * KIB


def test_without_a_device_there_is_nothing_to_calibrate():
    assert calibrate(torch.device("cpu")) == CopyPolicy()


def test_capabilities_say_what_is_missing():
    found = capabilities()
    assert found.kernels == (not found.missing)
    if found.driver is None:
        assert "libcuda.so.1" in " ".join(found.missing)
        assert not found.batched_dma
    if found.nvrtc is None:
        assert "searched" in " ".join(found.missing)


def test_loading_the_kernels_loads_neither_driver_nor_compiler():
    code = (
        "import kvconnect.kernels.cuda.device, kvconnect.kernels.policy, kvconnect.kernels.copy\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libnvrtc' not in maps\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
