"""SGLang in an environment without a GPU and without most of what it wants to be installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_PICTURES = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
    "torchvision.io",
)


class _StandIn(ModuleType):
    """Has every name; what that is cannot be used, but for enumerations of nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"BICUBIC": 3, "BILINEAR": 2})


def stand_in_for_torchvision() -> None:
    """It is for pictures, and fits only the torch of its very version."""
    import transformers

    assert transformers.AutoProcessor  # which has seen that there is none, by now

    for name in _PICTURES:
        module = sys.modules[name] = _StandIn(name, "a stand-in, made by a test")
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from kvconnect.engine.checkpoint.random_model import make_model

    return make_model(tmp_path_factory.mktemp("sglang") / "model", "llama", num_layers=2)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """What SGLang's launcher publishes."""
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0
    ):
        yield


if find_spec("sglang") is not None and find_spec("torchvision") is None:
    stand_in_for_torchvision()
