"""The kernels compiled with g++, where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
from shim_library import ShimLibrary, compiler


@pytest.fixture(scope="session")
def shim_folder(pytestconfig: pytest.Config) -> Path:
    """Where compiled shims are kept from run to run."""
    if compiler() is None:
        pytest.skip("g++ is not installed: the kernels cannot be run on the CPU")
    return Path(pytestconfig.cache.mkdir("kernel-shim"))


@pytest.fixture(scope="session")
def shim(shim_folder: Path) -> ShimLibrary:
    """The kernels, with every access and all arithmetic checked."""
    return ShimLibrary(shim_folder)
