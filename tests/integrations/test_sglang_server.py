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
from sglang_server import serving

from kvconnect.errors import ConfigurationError, UnsupportedModel
from kvconnect.integrations.sglang import KvConnectStorage

PAGES = list(range(4))
NAMED = {"model_revision": "org/name@1"}

Open = Callable[..., KvConnectStorage]


@pytest.fixture
def opened(tiny: Path, tmp_path: Path) -> Iterator[Open]:
    """The storage that a server with these settings makes when it starts, in place of the last."""
    url = f"disk://{tmp_path}/kv?capacity=64MiB"
    with ExitStack() as servers:

        def make(
            name: str = "the served name",
            *,
            own: dict[str, Any] | None = None,
            dtype_of_pool: torch.dtype = torch.float32,
            **settings: Any,
        ) -> KvConnectStorage:
            servers.close()
            server = servers.enter_context(serving(tiny, **settings))
            config = storage_config(name, url, **(own or {}))
            made = server.start(lambda: KvConnectStorage(config, {}))
            servers.callback(made.close)
            pool = StandInPool("page_first", dtype=dtype_of_pool)
            fill(pool)
            made.register_mem_pool_host(pool)
            return made

        yield make


def save(storage: KvConnectStorage) -> None:
    assert storage.batch_set_v1(hashes(len(PAGES)), indices(PAGES)) == [True] * len(PAGES)
    assert storage._access.flush(60)


def found(storage: KvConnectStorage) -> int:
    return storage.batch_exists(hashes(len(PAGES)))


def test_settings_that_change_keys_and_values_are_apart_and_names_and_orders_are_not(opened: Open):
    save(opened(served_model_name="a name", mm_process_config={"image": {"a": 1, "b": 2}}))
    plain = {"mm_process_config": {"image": {"b": 2, "a": 1}}}
    neutral = {"quantization": None, "json_model_override_args": "{}", "dtype": "auto"}
    same = opened("another name", **plain, **neutral, weight_version="default")
    assert found(same) == len(PAGES)
    for other in (
        {"load_format": "bitsandbytes"},
        {"weight_version": "2"},
        {"mm_process_config": None},
    ):
        assert found(opened(**(plain | other))) == 0


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
def test_weights_that_are_not_read_from_the_directory_are_named_or_refused(opened: Open, elsewhere):
    with pytest.raises(ConfigurationError, match="model_revision"):
        opened(**elsewhere)
    opened(**elsewhere, own=NAMED)


def test_weights_of_no_files_are_refused_by_any_name(opened: Open):
    with pytest.raises(ConfigurationError, match="load-format=dummy"):
        opened(load_format="dummy", own=NAMED)


def test_of_files_the_content_is_in_keys(opened: Open, tmp_path):
    scales, moved = tmp_path / "scales.json", tmp_path / "moved.json"
    scales.write_text('{"k": 1}')
    moved.write_text('{"k": 1}')
    save(opened(quantization_param_path=str(scales)))
    assert found(opened(quantization_param_path=str(moved))) == len(PAGES)
    scales.write_text('{"k": 2}')
    assert found(opened(quantization_param_path=str(scales))) == 0


def test_bytes_of_a_pool_are_what_the_server_says(opened: Open):
    save(opened(dtype_of_pool=torch.uint8, kv_cache_dtype="fp8_e4m3"))
    assert found(opened(dtype_of_pool=torch.uint8, kv_cache_dtype="fp8_e5m2")) == 0
    assert found(opened(dtype_of_pool=torch.uint8, kv_cache_dtype="fp8_e4m3")) == len(PAGES)


LONGER = {"max_position_embeddings": 8192} | LONG


@pytest.mark.planted("long-factors", "sglang", "refused")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"context_length": 4097},
        {"model_path": None, "json_model_override_args": json.dumps({"text_config": LONG})},
        {"model_path": None, "json_model_override_args": json.dumps(LONGER)},
    ],
    ids=["of the model", "context length", "of a part", "override"],
)
def test_where_the_longest_of_a_batch_decides_a_model_is_refused(opened: Open, with_rope, settings):
    settings = {"model_path": str(with_rope)} | settings
    with pytest.raises(UnsupportedModel, match=r"--context-length 4096 or less"):
        opened(**{name: value for name, value in settings.items() if value is not None})
    opened(**(settings | {"context_length": 4096, "model_path": str(with_rope)}))


def test_without_a_server_the_model_tells_how_long_sequences_are(with_rope, tiny):
    with pytest.raises(UnsupportedModel, match="context-length=131072"):
        KvConnectStorage(storage_config(with_rope, "memory:"), {})
    KvConnectStorage(storage_config(tiny, "memory:"), {}).close()
