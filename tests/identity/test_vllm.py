"""Planted identities behind vLLM's connector and tier, with stand-ins for vLLM.

Those that need a real engine stand in ``tests/engines/vllm``; requests, weights and pictures in
``tests/integrations/test_vllm_*.py``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvconnect.errors import ConfigurationError, ModelChanged
from kvconnect.integrations.core.arguments import make_arguments
from kvconnect.integrations.core.models import digest_of_model
from kvconnect.integrations.core.requests import RequestMaker, extra_key_of
from kvconnect.integrations.core.settings import EngineSettings
from kvconnect.integrations.vllm import configured as configured_module
from kvconnect.integrations.vllm.configured import LookupTimes
from kvconnect.integrations.vllm.identity import refuse_unserved, variant_of
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.tokens import as_token_array

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "rope_theta": 10000.0}
EARLIER = "082682b0b1402d8171cc1f8abc95518e86ceb2f9b32f4d106f4a0e490ba4b60c"
"""The first key of `TOKENS` with the model of `directory`, as release 0.1 made it."""
LAYOUT = KvCacheLayout(2, 2, 8, 8, 16, torch.float32)
TOKENS = list(range(16))


def put(directory: Path, name: str, content: object) -> None:
    """A file of the model's; numbers stand for weights."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        path.write_text(json.dumps(content), encoding="utf-8")
    elif name.endswith(".safetensors"):
        save_file({"w": torch.full((8,), float(content))}, path)
    else:
        path.write_bytes(f"weights {content}".encode())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model's, with one loader's files."""
    made = tmp_path / "model"
    put(made, "config.json", CONFIG)
    put(made, "model.safetensors", 1)
    return made


def configured(directory: Path, *, load_format: str = "auto", **model: Any) -> SimpleNamespace:
    """What the connector reads of vLLM's configuration."""
    settings = {
        "model": str(directory),
        "dtype": torch.float32,
        "quantization": None,
        "hf_overrides": {},
        "hf_config": SimpleNamespace(to_dict=lambda: dict(CONFIG)),
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        speculative_config=None,
        load_config=SimpleNamespace(load_format=load_format),
        model_config=SimpleNamespace(**(settings | model)),
        device_config=SimpleNamespace(device_type="cuda"),
    )


def key_of(
    config: SimpleNamespace,
    layout: KvCacheLayout = LAYOUT,
    since_ns: int | None = None,
    salt: str | None = None,
    revision: str | None = None,
) -> BlockKey:
    """The first key of `TOKENS`, as the connector makes it."""
    settings = EngineSettings.of("vllm", {"url": "memory:"}, where="test")
    refuse_unserved(config)
    directory = Path(config.model_config.model)
    since_ns = time.time_ns() if since_ns is None else since_ns
    digest = digest_of_model(directory, since_ns=since_ns, revision=revision)
    args = make_arguments(settings, directory, digest, [layout])
    maker = RequestMaker(args, extra_key_of(settings, variant_of(config, [layout])))
    request = maker.make(as_token_array(TOKENS[: layout.tokens_per_block]), cache_salt=salt)
    return request.key_chain.keys()[0]


# ------------------------------------------------------------------ the directory's files

SHARDS = {
    "model-00001-of-00001.safetensors": 2,
    "model-00002-of-00002.safetensors": 3,
    "model.safetensors.index.json": {"weight_map": {"w": "model-00001-of-00001.safetensors"}},
}


@pytest.mark.parametrize(
    ("beside", "changed", "into"),
    [
        pytest.param(
            {}, "model.safetensors", 7, marks=pytest.mark.planted("other-model", "vllm", "key")
        ),
        pytest.param(
            SHARDS,
            "model.safetensors.index.json",
            {"weight_map": {"w": "model-00002-of-00002.safetensors"}},
            marks=pytest.mark.planted("index-changed", "vllm", "key"),
        ),
        pytest.param(
            {"model.fp16.safetensors": 2},
            "model.fp16.safetensors",
            7,
            marks=pytest.mark.planted("variant", "vllm", "key"),
        ),
        pytest.param(
            {"text/model.safetensors": 2},
            "text/model.safetensors",
            7,
            marks=pytest.mark.planted("subfolder", "vllm", "key"),
        ),
        pytest.param(
            {"pytorch_model.bin": 2},
            "pytorch_model.bin",
            7,
            marks=pytest.mark.planted("bin-beside-safetensors", "vllm", "key"),
        ),
        pytest.param(
            {"consolidated.00.pth": 2, "model.pt": 2},
            "model.pt",
            7,
            marks=pytest.mark.planted("pt-beside", "vllm", "key"),
        ),
        pytest.param(
            {"model.gguf": 2},
            "model.gguf",
            7,
            marks=pytest.mark.planted("gguf-beside", "vllm", "key"),
        ),
        pytest.param(
            {"model.npz": 2},
            "model.npz",
            7,
            marks=pytest.mark.planted("npz-beside", "vllm", "key"),
        ),
        pytest.param(
            {"params.json": {"rope_theta": 1.0}, "consolidated.safetensors": 2},
            "params.json",
            {"rope_theta": 2.0},
            marks=pytest.mark.planted("params-json", "vllm", "key"),
        ),
        pytest.param(
            {"quantize_config.json": {"bits": 4}},
            "quantize_config.json",
            {"bits": 8},
            marks=pytest.mark.planted("quantize-config", "vllm", "key"),
        ),
        pytest.param(
            {"adapter_config.json": {"r": 8}, "adapter_model.safetensors": 2},
            "adapter_model.safetensors",
            7,
            marks=pytest.mark.planted("adapter-in-directory", "vllm", "key"),
        ),
        pytest.param(
            {},
            "config.json",
            CONFIG | {"rope_theta": 5.0},
            marks=pytest.mark.planted("config-changed", "vllm", "key"),
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_every_file_that_a_loader_may_read_is_in_the_keys(directory, beside, changed, into):
    for name, content in beside.items():
        put(directory, name, content)
    before = key_of(configured(directory))
    assert key_of(configured(directory)) == before
    put(directory, changed, into)
    assert key_of(configured(directory)) != before


@pytest.mark.planted("weight-byte", "vllm", "key")
def test_one_byte_of_the_weights_is_in_the_keys(directory):
    before = key_of(configured(directory))
    path = directory / "model.safetensors"
    state = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert key_of(configured(directory)) != before


@pytest.mark.planted("files-alone", "vllm", "hit")
def test_stores_of_earlier_releases_are_found(directory):
    assert key_of(configured(directory)).hex() == EARLIER


# ------------------------------------------------------------------ since when


@pytest.mark.planted("replaced-after-loading", "vllm", "refused")
def test_files_that_changed_since_the_configuration_was_made_are_refused(directory, monkeypatch):
    """In the user's own process; an engine's own process is older than its engine."""
    times = LookupTimes()
    times.note()  # by an import of the user's
    begun = time.time_ns()
    monkeypatch.setitem(globals(), "__name__", configured_module._CONFIGURATION)
    times.note()
    monkeypatch.undo()
    times.note()  # by vLLM's statistics
    since_ns = times.take()  # for the worker's half
    assert since_ns >= begun
    assert times.take() == since_ns  # for the scheduler's half
    put(directory, "pytorch_model.bin", 2)
    os.utime(directory / "pytorch_model.bin", ns=(since_ns + 10**9, since_ns + 10**9))
    with pytest.raises(ModelChanged, match="after this process"):
        key_of(configured(directory), since_ns=since_ns)
    monkeypatch.setitem(globals(), "__name__", configured_module._CONFIGURATION)
    times.note()
    assert times.take() > since_ns  # of the next engine


# ------------------------------------------------------------------ what the engine makes of them


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(
            {"hf_overrides": {"rope_theta": 5.0}},
            marks=pytest.mark.planted("overridden-configuration", "vllm", "key"),
        ),
        pytest.param(
            {"config_format": "mistral"},
            marks=pytest.mark.planted("overridden-configuration", "vllm", "key"),
        ),
        pytest.param(
            {"dtype": torch.bfloat16},
            marks=pytest.mark.planted("computes-in-other-dtype", "vllm", "key"),
        ),
        pytest.param(
            {"quantization": "fp8"}, marks=pytest.mark.planted("quantization", "vllm", "key")
        ),
    ],
    ids=str,
)
def test_settings_of_the_engine_are_in_the_keys(directory, other):
    usual = key_of(configured(directory))
    assert key_of(configured(directory, config_format="hf")) == usual
    assert key_of(configured(directory, **other)) != usual


@pytest.mark.planted("params-json", "vllm", "key")
def test_a_configuration_of_another_format_counts_as_it_was_read(directory):
    put(directory, "params.json", {"rope_theta": 1.0})
    put(directory, "consolidated.safetensors", 2)

    def read(theta: float) -> BlockKey:
        found = SimpleNamespace(to_dict=lambda: {"rope_theta": theta, "_name_or_path": str(theta)})
        return key_of(configured(directory, hf_config=found))

    assert read(1.0) == read(1.0) != read(2.0)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            KvCacheLayout(2, 2, 8, 8, 8, torch.float32),
            marks=pytest.mark.planted("other-block-size", "vllm", "key"),
        ),
        pytest.param(
            KvCacheLayout(2, 2, 8, 8, 16, torch.float32, window=64),
            marks=pytest.mark.planted("other-window", "vllm", "key"),
        ),
        pytest.param(
            KvCacheLayout(2, 2, 8, 8, 16, torch.float16),
            marks=pytest.mark.planted("cache-dtype", "vllm", "key"),
        ),
    ],
    ids=["block-size", "window", "dtype"],
)
def test_what_the_cache_holds_is_in_the_keys(directory, layout):
    assert key_of(configured(directory), layout) != key_of(configured(directory))


@pytest.mark.planted("same-revision", "vllm", "key")
def test_a_revision_stands_for_weights_and_not_for_settings(directory):
    usual = key_of(configured(directory), revision="mine")
    put(directory, "model.safetensors", 7)
    assert key_of(configured(directory), revision="mine") == usual
    put(directory, "config.json", CONFIG | {"rope_theta": 5.0})
    assert key_of(configured(directory), revision="mine") != usual


@pytest.mark.planted("weights-from-elsewhere", "vllm", "refused")
@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "a plug-in's"])
def test_weights_that_are_not_the_directorys_are_refused(directory, load_format):
    with pytest.raises(ConfigurationError, match="load_format"):
        key_of(configured(directory, load_format=load_format))


# ------------------------------------------------------------------ what comes with a request


@pytest.mark.planted("long-salt", "vllm", "key")
def test_salts_of_any_length_are_apart(directory):
    salts = [None, "a", "ab", "a" * 5000, "a" * 5000 + "b", "b" + "a" * 5000]
    keys = {key_of(configured(directory), salt=salt) for salt in salts}
    assert len(keys) == len(salts)
