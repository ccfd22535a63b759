"""Wrong settings say so when the engine starts; those that change KV are in its keys."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

from vllm.config import KVTransferConfig, PoolerConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm_engine import SIZE, connector, engine, prompts_of

from kvconnect.errors import ConfigurationError
from kvconnect.integrations.vllm import KvConnect
from kvconnect.integrations.vllm.identity import variant_of

pytestmark = pytest.mark.engines

MEAN = {
    "runner": "pooling",
    "convert": "embed",
    "skip_tokenizer_init": False,
    "pooler_config": PoolerConfig(seq_pooling_type="MEAN"),
}


@pytest.mark.parametrize(
    ("transfer", "options", "says"),
    [
        (connector("memory:"), {"hf_overrides": lambda one: one}, "hf_overrides"),
        (connector("memory:", namespace="shared"), {"hf_overrides": {"x": 1}}, "hf_overrides"),
        (connector("redis://127.0.0.1:1"), {}, "cannot be opened"),
        (connector("memory:"), {"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype: bfloat16 for a"),
        (connector("memory:"), MEAN, "hidden states of all tokens"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_what_is_wrong_is_said_at_start(llama, transfer, options, says):
    with pytest.raises(ConfigurationError, match=says), engine(llama, transfer, **options):
        pass


def several(**child: Any) -> dict[str, Any]:
    return connector("") | {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": {"connectors": [connector("memory:"), child]},
    }


@pytest.mark.parametrize(
    ("transfer", "says"),
    [
        (connector("dsik:/tmp/x"), "store scheme 'dsik' is unknown"),
        (several(**connector("memory:", urls=1)), "unknown field 'urls'"),
    ],
    ids=["scheme", "child"],
)
def test_a_typo_is_found_before_the_weights_are_loaded(llama, tmp_path, transfer, says):
    """The files of these weights cannot be loaded."""
    directory = shutil.copytree(llama, tmp_path / "model")
    (directory / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=says), engine(directory, transfer):
        pass


def test_code_of_another_repository_is_refused(llama, tmp_path):
    directory = shutil.copytree(llama, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "org/x--modeling.Model"}
    (directory / "config.json").write_text(json.dumps(config))
    with (
        pytest.raises(ConfigurationError, match="auto_map: 'org/x--"),
        engine(directory, connector("memory:"), trust_remote_code=True),
    ):
        pass


# ---------------------------------------------------------------------- settings in keys


def copy_with(model: Path, where: Path, **changed: Any) -> str:
    """The model, with other settings in its ``config.json``."""
    shutil.copytree(model, where)
    settings = json.loads((where / "config.json").read_text(encoding="utf-8"))
    (where / "config.json").write_text(json.dumps(settings | changed), encoding="utf-8")
    return str(where)


def variant(model: Path | str, **options: Any) -> dict[str, str]:
    """What of vLLM's settings is in keys."""
    made = EngineArgs(str(model), skip_tokenizer_init=True, dtype="float32", **options)
    return variant_of(made.create_engine_config())


@pytest.mark.planted("overridden-configuration", "vllm", "key")
def test_a_configuration_that_comes_from_another_directory(llama, tmp_path):
    ropes = [{"rope_type": "default", "rope_theta": theta} for theta in (50.0, 60.0)]
    others = [
        variant(llama, hf_config_path=copy_with(llama, tmp_path / str(number), rope_parameters=one))
        for number, one in enumerate(ropes)
    ]
    assert variant(llama) == {}
    assert [list(one) for one in others] == [["hf_config_path"]] * 2
    assert others[0] != others[1]


def test_the_long_factors_of_a_rope(llama, tmp_path):
    """VLLM turns all tokens by them if ``max_model_len`` is beyond the original length."""
    half = SIZE["hidden_size"] // SIZE["num_heads"] // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * half,
        "long_factor": [float(2 + number) for number in range(half)],
        "original_max_position_embeddings": 256,
        "factor": 32.0,
    }
    original = {"original_max_position_embeddings": 256, "max_position_embeddings": 8192}
    model = copy_with(llama, tmp_path / "long", rope_parameters=rope, **original)
    assert variant(model, max_model_len=256) == {}
    assert variant(model, max_model_len=1024) == variant(model, max_model_len=2048) != {}


def test_the_class_is_known_by_name():
    assert KVConnectorFactory.get_connector_class_by_name("KvConnect") is KvConnect
    config = KVTransferConfig(**connector("memory:"))
    assert KVConnectorFactory.get_connector_class(config) is KvConnect
    assert KVConnectorFactory.supports_hma_config(config)
    assert not KvConnect.requires_piecewise_for_cudagraph({})


def test_the_policy_to_fail_is_warned_of(llama, caplog):
    logging.getLogger("kvconnect").propagate = True
    transfer = connector("memory:", KV_LOAD_FAILURE_POLICY="fail")
    with caplog.at_level(logging.WARNING, "kvconnect"), engine(llama, transfer) as made:
        made.answer(prompts_of(40))
    assert any("kv_load_failure_policy='fail'" in one.getMessage() for one in caplog.records)
