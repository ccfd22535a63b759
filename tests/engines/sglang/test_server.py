"""What is read of SGLang's server, from its own context; and why some of it is refused."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from kvconnect.integrations.sglang import server, settings, weights
from kvconnect.integrations.sglang.server import Server

pytest.importorskip("sglang", reason="SGLang is not installed here: make test-engines")


def test_settings_are_those_in_effect(tmp_path):
    context = import_module("sglang.srt.runtime_context").get_context()
    assert Server().setting("model_path") is None
    with context.override_server_args(
        context_length=4096, json_model_override_args='{"rope_theta": 1e6}', revision="main"
    ):
        here = Server()
        assert [here.setting(name) for name in ("context_length", "revision")] == [4096, "main"]
        assert here.variant(tmp_path, "float32") == {
            "json_model_override_args": '{"rope_theta": 1e6}'
        }
        before = here.weights()
        context.override("a test", model_path="/elsewhere", load_format="auto")
        assert here.weights() != before


@pytest.mark.parametrize(
    "name",
    [
        *("model_path", "revision", "download_dir", "load_format", "context_length"),
        *("weight_version", "kv_cache_dtype", "enable_lora", "lora_paths"),
        *("enable_weights_cpu_backup", "dllm_algorithm", "model_loader_extra_config"),
        "disaggregation_decode_enable_offload_kvcache",
        "enable_int8_mamba_checkpoint",
        *server._SETTINGS,
        *server._STATE_SETTINGS,
        *server._FILES,
        *settings._ELSEWHERE,
        *weights._MOVING,
    ],
)
def test_sglang_has_the_settings_that_are_asked_for(name):
    context = import_module("sglang.srt.runtime_context").get_context()
    with context.override_server_args():
        context.config_leaf(name)


def test_a_tokens_key_depends_on_the_others_of_its_batch():
    """Of a model with ``longrope`` and sequences beyond its original length."""
    kind = import_module("sglang.srt.layers.rotary_embedding.rope_variant")
    rope = kind.Phi3LongRoPEScaledRotaryEmbedding(
        8, 8, 64, 16, 10_000, True, torch.float32, [1.0] * 4, [4.0] * 4
    )

    def key_at_3(*others: int) -> torch.Tensor:
        positions = torch.tensor([3, *others])
        ones = torch.ones(len(positions), 8)
        return rope(positions, ones, ones)[1][0]

    assert torch.equal(key_at_3(), key_at_3(15))
    assert not torch.equal(key_at_3(), key_at_3(17))
