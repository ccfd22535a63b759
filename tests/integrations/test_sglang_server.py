"""What SGLang's server was told is in the keys of its pages, or refused: with a stand-in for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from long_rope import LONG
from sglang_pools import StandInPool, fill, hashes, indices, storage_config
from stand_ins import module

from kvconnect.errors import ConfigurationError, UnsupportedModel
from kvconnect.integrations.sglang import KvConnectStorage
from kvconnect.trace import metrics

PAGES = list(range(4))


class Context:
    """SGLang's ``RuntimeContext``, as far as it is read."""

    def __init__(self, **settings: object) -> None:
        self.settings = settings

    def config_bag(self, name: str) -> object:
        if not self.settings:
            raise ValueError(f"config namespace {name!r} not published")
        return self

    def config_leaf(self, name: str) -> Any:
        if name not in self.settings:
            raise ValueError(f"{name!r} is not a config leaf (no namespace)")
        return self.settings[name]


@pytest.fixture
def serve(tiny: Path, clean_modules: None) -> Callable[..., Context]:
    """This process is a server with these settings."""

    def make(**settings: object) -> Context:
        context = Context(**{"model_path": str(tiny), "load_format": "auto"} | settings)
        for name in ("sglang", "sglang.srt"):
            module(name, path="")
        module("sglang.srt.runtime_context", get_context=lambda: context)
        return context

    return make


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., KvConnectStorage]]:
    made: list[KvConnectStorage] = []

    def make(name: object = "the served name", **more: object) -> KvConnectStorage:
        url = f"disk://{tmp_path}/kv?capacity=64MiB"
        made.append(KvConnectStorage(storage_config(name, url, **more), {}))
        pool = StandInPool("page_first")
        fill(pool)
        made[-1].register_mem_pool_host(pool)
        return made[-1]

    yield make
    for one in made:
        one.close()


def save(storage: KvConnectStorage) -> list[bool]:
    done = storage.batch_set_v1(hashes(len(PAGES)), indices(PAGES))
    assert storage._access is None or storage._access.flush(5)
    return done


def found(storage: KvConnectStorage) -> int:
    return storage.batch_exists(hashes(len(PAGES)))


def test_the_model_is_what_the_server_loaded_whatever_it_is_called(serve, opened):
    serve(served_model_name="the served name")
    assert save(opened()) == [True] * len(PAGES)
    assert found(opened("another name")) == len(PAGES)


@pytest.mark.parametrize(
    "other",
    [
        {"quantization": "fp8"},
        {"json_model_override_args": '{"rope_theta": 1e6}'},
        {"load_format": "bitsandbytes"},
        {"dtype": "float16"},
        {"mm_process_config": {"image": {"max_pixels": 1000}}},
        {"weight_version": "2"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_settings_that_change_keys_and_values_are_apart(serve, opened, other):
    serve()
    save(opened())
    serve(quantization=None, json_model_override_args="{}", dtype="auto", weight_version="default")
    assert found(opened()) == len(PAGES)
    serve(**other)
    assert found(opened()) == 0


def test_weights_from_elsewhere_are_named_or_refused(serve, opened, tiny):
    serve(load_format="dummy")
    with pytest.raises(ConfigurationError, match="load-format=dummy"):
        opened(model_revision="org/name@1")
    serve(load_format="remote")
    with pytest.raises(ConfigurationError, match=r"load-format='remote'.*model_revision"):
        opened()
    opened(model_revision="org/name@1")


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"load_format": "presharded"},
        {"weight_cache_mode": "client"},
        {"kt_weight_path": "/other"},
        {"modelopt_checkpoint_restore_path": "/other"},
        {"checkpoint_engine_wait_weights_before_ready": True},
    ],
    ids=lambda one: next(iter(one)),
)
def test_weights_that_are_not_read_from_the_directory_are_refused(serve, opened, elsewhere):
    serve(**elsewhere)
    with pytest.raises(ConfigurationError, match="model_revision"):
        opened()
    opened(model_revision="org/name@1")


@pytest.mark.parametrize("lora", [{"enable_lora": True}, {"lora_paths": ["a=/adapters/a"]}])
def test_adapters_which_sglang_tells_by_name_are_refused(serve, opened, lora):
    serve(**lora)
    with pytest.raises(ConfigurationError, match="enable-lora"):
        opened(model_revision="org/name@1")
    serve(enable_lora=False, lora_paths=None)
    opened()


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


def test_the_order_of_a_settings_fields_is_none_of_its_value(serve, opened):
    serve(mm_process_config={"image": {"a": 1, "b": 2}})
    save(opened())
    serve(mm_process_config={"image": {"b": 2, "a": 1}})
    assert found(opened()) == len(PAGES)


@pytest.mark.parametrize(
    "replaced", [{"model_path": "/elsewhere"}, {"load_format": "pt"}, {"weight_version": "2"}]
)
def test_after_the_weights_were_replaced_nothing_is_found_or_saved(serve, opened, replaced):
    context = serve(weight_version="default")
    storage = opened()
    save(storage)
    assert found(storage) == len(PAGES)
    context.settings |= replaced
    counted = metrics.snapshot().get("engine.request.uncached", 0)
    assert found(storage) == 0
    assert metrics.snapshot()["engine.request.uncached"] == counted + 1
    assert save(storage) == [False] * len(PAGES)
    assert storage.batch_get_v1(hashes(len(PAGES)), indices(PAGES)) == [False] * len(PAGES)


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


@pytest.mark.parametrize("given", [None, 4097])
def test_where_the_longest_of_a_batch_decides_a_model_is_refused(serve, opened, with_rope, given):
    serve(model_path=str(with_rope), context_length=given)
    with pytest.raises(UnsupportedModel, match=r"--context-length 4096 or less"):
        opened()
    serve(model_path=str(with_rope), context_length=4096)
    opened()


@pytest.mark.parametrize(
    "override",
    [LONG, {"text_config": LONG}, {"max_position_embeddings": 8192} | LONG],
    ids=["whole", "of a part", "longer"],
)
def test_overrides_of_the_configuration_count(serve, opened, override):
    serve(json_model_override_args=json.dumps(override))
    with pytest.raises(UnsupportedModel, match=r"--context-length 4096 or less"):
        opened()


def test_without_a_server_the_model_tells_how_long_sequences_are(opened, with_rope, tiny):
    with pytest.raises(UnsupportedModel, match="context-length=131072"):
        opened(with_rope)
    opened(tiny)
