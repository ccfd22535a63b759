"""Which way a copy takes, and what a machine lacks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvconnect.errors import ConfigurationError
from kvconnect.kernels.cuda.copy_policy import CopyPolicy
from kvconnect.kernels.policy import capabilities


@pytest.mark.parametrize("field", ["load_dma_from", "host_ctas", "num_slots"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_policy_of_nonsense_is_refused_by_name(field, value):
    with pytest.raises(ConfigurationError, match=field):
        CopyPolicy(**{field: value})


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
