"""The kernels compiled with g++, where there is one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from shim_library import ShimLibrary, compiler

from kvconnect.kernels.cuda.compile.nvrtc import Nvrtc, NvrtcMissing, find_nvrtc


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


@pytest.fixture(scope="session")
def nvrtc() -> Nvrtc:
    """The compiler that comes with torch, or as a package."""
    try:
        return find_nvrtc()
    except NvrtcMissing as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def nvcc() -> str:
    """The compiler of a toolkit."""
    path = shutil.which("nvcc")
    if path is None:
        pytest.skip("nvcc is not installed")
    return path
