"""``kvconnect bench kernels`` measures what it says, with and without a device."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to measure")
def test_without_a_device_the_host_is_measured_and_the_rest_said_to_be_skipped(bench):
    figures, err = bench("kernels", "--total", "1MiB", "--repeats", 1)
    assert next(iter(figures)) == "memcpy"
    for name in ("gather, runs of 64 KiB", "scatter, runs of 2 MiB", "copy, runs of 512 B"):
        assert (figures[name]["unit"], figures[name]["value"] > 0) == ("%", True)
    assert figures["kv_cache_update, runs of 64 KiB"]["target"] == ">= 50 %"
    assert figures["a call of reshape_and_cache"]["unit"] == "us"
    assert "no CUDA device" in err
    assert "skipped" in err
