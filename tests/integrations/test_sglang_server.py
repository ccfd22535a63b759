"""What SGLang's server was told is in the keys of its pages, or refused: with a stand-in for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from long_rope import LONG
from sglang_pools import StandInPool, fill, hashes, indices, storage_config
from sglang_server import Server, serving

from kvconnect.errors import ConfigurationError, UnsupportedModel
from kvconnect.integrations.sglang import KvConnectStorage

PAGES = list(range(4))


@pytest.fixture
def serve(tiny: Path) -> Iterator[Callable[..., Server]]:
    """This process is a server with these settings, until it is another one."""
    with ExitStack() as servers:

        def make(**settings: Any) -> Server:
            servers.close()
            current.clear()
            current.append(servers.enter_context(serving(tiny, **settings)))
            return current[0]

        current: list[Server] = []
        make.current = current
        yield make


@pytest.fixture
def opened(tmp_path: Path, serve: Any) -> Iterator[Callable[..., KvConnectStorage]]:
    """A storage that the current server makes when it starts."""
    made: list[KvConnectStorage] = []

    def make(name: object = "the served name", **more: object) -> KvConnectStorage:
        url = f"disk://{tmp_path}/kv?capacity=64MiB"

        def storage() -> KvConnectStorage:
            return KvConnectStorage(storage_config(name, url, **more), {})

        made.append(serve.current[0].start(storage) if serve.current else storage())
        pool = StandInPool("page_first")
        fill(pool)
        made[-1].register_mem_pool_host(pool)
        return made[-1]

    yield make
    for one in made:
        one.close()


def save(storage: KvConnectStorage) -> list[bool]:
    done = storage.batch_set_v1(hashes(len(PAGES)), indices(PAGES))
    assert storage._access is None or storage._access.flush(60)
    return done


def found(storage: KvConnectStorage) -> int:
    return storage.batch_exists(hashes(len(PAGES)))


def test_settings_that_change_keys_and_values_are_apart_and_names_and_orders_are_not(serve, opened):
    serve(served_model_name="the served name", mm_process_config={"image": {"a": 1, "b": 2}})
    assert save(opened()) == [True] * len(PAGES)
    plain = {"mm_process_config": {"image": {"b": 2, "a": 1}}}
    neutral = {"quantization": None, "json_model_override_args": "{}", "dtype": "auto"}
    serve(**plain, **neutral, weight_version="default")
    assert found(opened("another name")) == len(PAGES)
    for other in (
        {"load_format": "bitsandbytes"},
        {"weight_version": "2"},
        {"mm_process_config": None},
    ):
        serve(**(plain | other))
        assert found(opened()) == 0


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"load_format": "remote"},
        {"load_format": "presharded"},
        {"weight_cache_mode": "client"},
        {"kt_weight_path": "/other"},
        {"modelopt_checkpoint_restore_path": "/other"},
        {"checkpoint_engine_wait_weights_before_ready": True},
    ],
    ids=lambda one: next(iter(one)),
)
def test_weights_that_are_not_read_from_the_directory_are_named_or_refused(
    serve, opened, elsewhere
):
    serve(**elsewhere)
    with pytest.raises(ConfigurationError, match="model_revision"):
        opened()
    opened(model_revision="org/name@1")


def test_weights_of_no_files_are_refused_by_any_name(serve, opened):
    serve(load_format="dummy")
    with pytest.raises(ConfigurationError, match="load-format=dummy"):
        opened(model_revision="org/name@1")


def test_of_files_the_content_is_in_keys(serve, opened, tmp_path):
    scales, moved = tmp_path / "scales.json", tmp_path / "moved.json"
    scales.write_text('{"k": 1}')
    moved.write_text('{"k": 1}')
    serve(quantization_param_path=str(scales))
    save(opened())
    serve(quantization_param_path=str(moved))
    assert found(opened()) == len(PAGES)
    scales.write_text('{"k": 2}')
    serve(quantization_param_path=str(scales))
    assert found(opened()) == 0


def test_bytes_of_a_pool_are_what_the_server_says(serve, opened, monkeypatch):
    class Bytes(StandInPool):
        def __init__(self, layout: str) -> None:
            super().__init__(layout, dtype=torch.uint8)

    monkeypatch.setattr(f"{__name__}.StandInPool", Bytes)
    serve(kv_cache_dtype="fp8_e4m3")
    save(opened())
    serve(kv_cache_dtype="fp8_e5m2")
    assert found(opened()) == 0
    serve(kv_cache_dtype="fp8_e4m3")
    assert found(opened()) == len(PAGES)


@pytest.mark.planted("long-factors", "sglang", "refused")
@pytest.mark.parametrize("given", [None, 4097])
def test_where_the_longest_of_a_batch_decides_a_model_is_refused(serve, opened, with_rope, given):
    serve(model_path=str(with_rope), context_length=given)
    with pytest.raises(UnsupportedModel, match=r"--context-length 4096 or less"):
        opened()
    serve(model_path=str(with_rope), context_length=4096)
    opened()


@pytest.mark.parametrize(
    "override",
    [{"text_config": LONG}, {"max_position_embeddings": 8192} | LONG],
    ids=["of a part", "longer"],
)
def test_overrides_of_the_configuration_count(serve, opened, override):
    serve(json_model_override_args=json.dumps(override))
    with pytest.raises(UnsupportedModel, match=r"--context-length 4096 or less"):
        opened()


def test_without_a_server_the_model_tells_how_long_sequences_are(opened, with_rope, tiny):
    with pytest.raises(UnsupportedModel, match="context-length=131072"):
        opened(with_rope)
    opened(tiny)
