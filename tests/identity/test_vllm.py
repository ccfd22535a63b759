"""Planted identities behind vLLM's connector and tier, with stand-ins for vLLM.

Those that need a real engine stand in ``tests/engines/vllm``; requests, weights and pictures in
``tests/integrations/test_vllm_*.py``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from file_plants import file_plants, flip_byte, put
from rows import cells
from vllm_configs import engine_config

from kvconnect.errors import ConfigurationError, ModelChanged
from kvconnect.integrations.core.arguments import make_arguments
from kvconnect.integrations.core.requests import RequestMaker, extra_key_of
from kvconnect.integrations.core.settings import EngineSettings
from kvconnect.integrations.vllm import callers
from kvconnect.integrations.vllm.configured import LookupTimes
from kvconnect.integrations.vllm.identity import model_identity, refuse_unserved, variant_of
from kvconnect.integrations.vllm_tier import identity as tier_identity
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.tokens import as_token_array

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "rope_theta": 10000.0}
EARLIER = "082682b0b1402d8171cc1f8abc95518e86ceb2f9b32f4d106f4a0e490ba4b60c"
"""The first key of `TOKENS` with the model of `directory`, as release 0.1 made it."""
LAYOUT = KvCacheLayout(2, 2, 8, 8, 16, torch.float32)
TOKENS = list(range(16))


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
    return engine_config(
        load_config=SimpleNamespace(load_format=load_format),
        model_config=SimpleNamespace(**(settings | model)),
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
    since_ns = time.time_ns() if since_ns is None else since_ns
    digest = model_identity(config, since_ns=since_ns, revision=revision)
    args = make_arguments(settings, Path(config.model_config.model), digest, [layout])
    maker = RequestMaker(args, extra_key_of(settings, variant_of(config, [layout])))
    request = maker.make(as_token_array(TOKENS[: layout.tokens_per_block]), cache_salt=salt)
    return request.key_chain.keys()[0]


# ------------------------------------------------------------------ the directory's files


@pytest.mark.parametrize("plant", file_plants("vllm", "key"))
def test_every_file_that_a_loader_may_read_is_in_the_keys(directory, plant):
    plant.prepare(directory)
    before = key_of(configured(directory))
    assert key_of(configured(directory)) == before
    plant.change(directory)
    assert key_of(configured(directory)) != before


@pytest.mark.planted("weight-byte", "vllm", "key")
def test_one_byte_of_the_weights_is_in_the_keys(directory):
    before = key_of(configured(directory))
    flip_byte(directory / "model.safetensors")
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
    monkeypatch.setitem(globals(), "__name__", callers._CONFIGURATION)
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
    monkeypatch.setitem(globals(), "__name__", callers._CONFIGURATION)
    times.note()
    assert times.take() > since_ns  # of the next engine


# ------------------------------------------------------------------ what the engine makes of them


OTHERS = cells(
    "vllm",
    "key",
    {
        "overridden-configuration": {"hf_overrides": {"rope_theta": 5.0}},
        "overridden-configuration: format": {"config_format": "mistral"},
        "computes-in-other-dtype": {"dtype": torch.bfloat16},
        "quantization": {"quantization": "fp8"},
    },
)


@pytest.mark.parametrize("other", OTHERS)
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


LAYOUTS = cells(
    "vllm",
    "key",
    {
        "other-block-size": KvCacheLayout(2, 2, 8, 8, 8, torch.float32),
        "other-window": KvCacheLayout(2, 2, 8, 8, 16, torch.float32, window=64),
        "cache-dtype": KvCacheLayout(2, 2, 8, 8, 16, torch.float16),
    },
)


@pytest.mark.parametrize("layout", LAYOUTS)
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


def identity_of_connector(config: SimpleNamespace, revision: str | None) -> bytes:
    return model_identity(config, revision=revision, since_ns=time.time_ns())


@pytest.mark.planted("weights-from-elsewhere", "vllm", "refused")
@pytest.mark.parametrize("identity", [identity_of_connector, tier_identity._model_digest])
def test_parts_of_other_repositories_are_refused(directory, identity):
    put(directory, "config.json", CONFIG | {"auto_map": {"AutoModel": "org/x--modeling.Model"}})
    code = configured(directory, trust_remote_code=True)
    part = configured(directory, hf_config=SimpleNamespace(text_model_id="org/part"))
    for config, said in ((code, "auto_map: 'org/x--modeling"), (part, "text_model_id=org/part")):
        with pytest.raises(ConfigurationError, match=said):
            identity(config, None)
        assert identity(config, "mine") == identity(configured(directory), "mine")


# ------------------------------------------------------------------ what comes with a request


@pytest.mark.planted("long-salt", "vllm", "key")
def test_salts_of_any_length_are_apart(directory):
    salts = [None, "a", "ab", "a" * 5000, "a" * 5000 + "b", "b" + "a" * 5000]
    keys = {key_of(configured(directory), salt=salt) for salt in salts}
    assert len(keys) == len(salts)
