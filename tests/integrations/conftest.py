"""The shim in a test, and out of the process after it; other projects' files from their wheels."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.integrations import trtllm_shim

sys.path.insert(0, str(Path(__file__).parent))

FOREIGN = ("tensorrt_llm", "sglang", "lmcache", "kvbm", "nixl", "zmq", "persistent_client")
"""Packages that a test of this folder brings into the process."""


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture
def clean_modules() -> Iterator[None]:
    """No module of those packages is left behind."""

    def foreign() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in FOREIGN]

    before = {name: sys.modules[name] for name in foreign()}
    for name in before:
        del sys.modules[name]
    yield
    for name in foreign():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def installed(clean_modules: None) -> None:
    """``tensorrt_llm`` is answered by the shim."""
    trtllm_shim.install()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers, in float32."""
    directory = tmp_path_factory.mktemp("clients") / "model"
    make_model(directory, "llama", num_layers=2, hidden_size=32)
    return directory


@pytest.fixture
def with_rope(tiny: Path, tmp_path: Path) -> Path:
    """The small model, as one with long factors."""
    from long_rope import LONG

    copy = tmp_path / "long"
    shutil.copytree(tiny, copy)
    config: dict[str, Any] = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | LONG))
    return copy
