"""The shim in a test, and out of the process after it; other projects' files from their wheels."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvconnect.backends.memory import from_url
from kvconnect.backends.url import StoreUrl
from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.integrations import trtllm_shim
from kvconnect.testing.faults.faulty_backend import FaultyBackend

FOREIGN = (
    "tensorrt_llm",
    "sglang",
    "lmcache",
    "kvbm",
    "nixl",
    "zmq",
    "persistent_client",
    "newest_client",
)
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


@pytest.fixture
def store() -> FaultyBackend:
    """What engines of `open_engine` keep their blocks in, unless they are given a URL."""
    return FaultyBackend(from_url(StoreUrl.parse("memory:?capacity=16MiB")))


@pytest.fixture
def clock() -> Any:
    """A `LoadClock`, which only a test turns."""
    from load_clock import LoadClock

    return LoadClock()


@pytest.fixture
def shared(tmp_path: Path) -> str:
    """A store that several engines use at once."""
    return f"disk://{tmp_path}/store?capacity=16MiB"


@pytest.fixture
def open_engine(store: FaultyBackend) -> Iterator[Callable[..., Any]]:
    """Makes stand-ins for vLLM, `vllm_stand_in.StandIn`; closes them."""
    from vllm_stand_in import BACKGROUND, LAYOUT, StandIn, T

    made: list[StandIn] = []

    def make(
        roles: Any = BACKGROUND,
        *,
        num_blocks: int = 40,
        chunk: int = 100,
        choice: Any = None,
        **config: Any,
    ) -> StandIn:
        settings = {"lookup_timeout_ms": 60_000, "load_timeout_s": 60.0} | config
        args = LlmArgs(
            model="none",
            kv_cache_config=KvCacheConfig(tokens_per_block=T),
            kv_connector_config=KvCacheConnectorConfig(
                backend=None if "url" in settings else store, save_partial_tails=False, **settings
            ),
            layouts=(LAYOUT,),
            model_digest=b"d" * 32,
        )
        made.append(StandIn(args, roles, num_blocks=num_blocks, chunk=chunk, choice=choice))
        return made[-1]

    yield make
    store.heal()
    for one in made:
        one.close()


@pytest.fixture
def classes(request: pytest.FixtureRequest, clean_modules: None) -> Iterator[tuple[type, type]]:
    """Ours, made of TensorRT-LLM's recorded abstract classes, in the module that a version has."""
    import trtllm_interface as trt
    from stand_ins import module
    from trtllm_pair import NEWER, forget_classes

    names = ("", "._torch", "._torch.pyexecutor", "._torch.pyexecutor.connectors")
    for name in names:
        module(f"tensorrt_llm{name}", path="")
    module(
        f"tensorrt_llm._torch.pyexecutor.{getattr(request, 'param', NEWER)}",
        KvCacheConnectorScheduler=trt.KvCacheConnectorScheduler,
        KvCacheConnectorWorker=trt.KvCacheConnectorWorker,
    )
    forget_classes()
    import kvconnect.integrations.trtllm as room

    yield room.KvConnectScheduler, room.KvConnectWorker
    forget_classes()


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Sets ``KVCONNECT_CONFIG``: a store on disk, unless another is given."""

    def configure(**more: object) -> None:
        url = f"disk://{tmp_path}/kv?capacity=64MiB"
        settings = {"url": url, "lookup_timeout_ms": 60_000, "staging_bytes": 1 << 20}
        settings["load_decisions"] = False
        monkeypatch.setenv("KVCONNECT_CONFIG", json.dumps(settings | more))

    return configure
