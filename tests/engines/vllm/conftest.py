"""Models for a real vLLM engine."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def make_vllm_model(tmp_path_factory: pytest.TempPathFactory):
    """The directory of a small random model that vLLM runs on the CPU; not to be changed."""
    root = tmp_path_factory.mktemp("vllm-models")

    @cache
    def directory(arch: str = "llama", seed: int = 0, **size: int) -> Path:
        from vllm_engine import SIZE

        from kvconnect.engine.checkpoint.random_model import make_model

        name = f"{arch}-{seed}-{len(size)}"
        return make_model(root / name, arch, seed=seed, **(SIZE | size))

    return directory


@pytest.fixture(scope="session")
def llama(make_vllm_model) -> Path:
    return make_vllm_model()


@pytest.fixture(params=[False, True], ids=["in-process", "core-process"])
def start(request: pytest.FixtureRequest):
    """`engine`, with its core in this process, or in one of its own as under ``vllm serve``."""
    from vllm_engine import engine

    return partial(engine, core_process=request.param)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"disk://{tmp_path}/store?capacity=256MiB"
