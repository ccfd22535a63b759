"""What tests on the shim share: grids, lengths of runs, a driver."""

from __future__ import annotations

import pytest
import torch
from fake_driver import FakeDriver
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kvconnect.kernels.cuda.copy_policy import CopyPolicy

FEW = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MANY = settings(FEW, max_examples=800)
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]

grids = st.sampled_from([1, 2, 3, 7, 10_000])
"""CTAs at most, from one to more than the work."""

in_two_lengths = pytest.mark.parametrize(
    "profile", [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=SLOW)]
)
"""The same test for `make test`, and for much longer."""


def driver_of(shim, ctas, *, reads=(), writes=()):
    """A driver whose kernels have `ctas` blocks at most, and may touch those tensors."""
    driver = FakeDriver(shim, everything=True)
    driver.multiprocessors = 1
    for tensors, writable in ((reads, False), (writes, True)):
        for tensor in tensors:
            driver.allow_tensor(tensor, writable=writable)
    return driver, CopyPolicy(ctas_per_multiprocessor=ctas)


def widths(driver, kind="writes"):
    """The sizes of accesses that kernels made, bytes: how many."""
    found: dict[int, int] = {}
    for report in driver.reports:
        for nbytes, count in enumerate(getattr(report, kind)):
            if count:
                found[nbytes] = found.get(nbytes, 0) + count
    return found


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, NaNs of equal bits too."""
    left, right = one.contiguous().view(-1), other.contiguous().view(-1)
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
