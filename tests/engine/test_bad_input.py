"""Bad input: the message names the field, the value and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from kvconnect import (
    LLM,
    KvCacheConfig,
    KvCacheConnectorConfig,
    KvCacheRetentionConfig,
    SamplingParams,
    TokenRangeRetentionConfig,
)
from kvconnect.errors import ConfigurationError, UnsupportedModel


@pytest.fixture(scope="module")
def llm(llama):
    config = KvCacheConfig(tokens_per_block=16, max_tokens=256)
    with LLM(llama, kv_cache=config) as opened:
        yield opened


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: it is empty"),
        ([[]], "prompt: it is empty"),
        ([[1, 2, 260]], "prompt: token id 260 is outside the model's vocabulary of 260"),
        ([[1, -1]], "prompt: token id -1 is outside"),
        ([[1, 2**40]], "prompt: token id 1099511627776 is outside int32"),
        ([[0.5, 1.0]], "prompt: integers are needed"),
        (np.zeros((2, 2, 2), int), "prompt: one dimension is needed, this has 2"),
        (
            [[5] * 300],
            "300 tokens with max_tokens=16 need 20 KV blocks of 16 tokens, the cache has 16; raise",
        ),
        (
            [[5] * 510],
            r"prompt: 510 tokens with max_tokens=16 exceed 512 positions \(the model's max_pos",
        ),
    ],
)
def test_prompts(llm, prompt, message):
    with pytest.raises(ConfigurationError, match=message):
        llm.generate(prompt)


@pytest.mark.parametrize("scheduling", ["guaranteed_no_evict", "max_utilization"])
def test_a_prompt_that_several_pools_could_never_hold(open_llm, mixed, scheduling):
    llm = open_llm(mixed, max_tokens=128, max_num_tokens=32, scheduling=scheduling)
    longest, one = llm.max_seq_len, SamplingParams(max_tokens=1)
    assert longest >= 128
    assert len(llm.generate([[5] * longest], one)[0].output_token_ids) == 1
    with pytest.raises(ConfigurationError, match=f"pools .*; a prompt of {longest} tokens fits"):
        llm.submit([5] * (longest + 1), one)
    with pytest.raises(ConfigurationError, match="need more KV blocks than the pools"):
        llm.submit([5], SamplingParams(max_tokens=2 * longest))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts: None is a NoneType; give text, token ids, or a list of these"),
        (b"text", "prompts: b'text' is a bytes; give text"),
        (7, "prompts: 7 is a int; give text"),
        ({1, 2}, "prompts: {1, 2} is a set; give text"),
        (iter([1, 2]), "prompts: .* is a list_iterator; give text"),
        (["text", None], "prompt: None is a NoneType; give text or token ids"),
        ([[1], b"text"], "prompt: b'text' is a bytes; give text or token ids"),
        ([None], "prompt: integers are needed, this is a sequence with None in it"),
        ([[1, "a"]], "prompt: integers are needed, this is a sequence"),
        (["a\ud800b"], r"prompt: '\\ud800' at position 1 is half of a surrogate pair"),
        (torch.ones(3, requires_grad=True), "prompt: .*not a flat sequence of integers.*grad"),
        ([torch.ones(3, requires_grad=True)], "prompt: .*not a flat sequence of integers.*grad"),
        (torch.tensor(5), "prompt: one dimension is needed, this has 0"),
    ],
)
def test_what_is_no_prompt(llm, prompts, message):
    with pytest.raises(ConfigurationError, match=message):
        llm.generate(prompts)


def changed_params(**fields: object) -> SamplingParams:
    return SamplingParams().model_copy(update=fields)


BAD_CARGO = [
    ({"sampling_params": {"temprature": 0.5}}, "SamplingParams: unknown field 'temprature'; did"),
    ({"sampling_params": "greedy"}, "sampling_params: 'greedy' is a str; give a SamplingParams"),
    ({"sampling_params": changed_params(temperature="hot")}, "SamplingParams.temperature='hot': "),
    ({"sampling_params": changed_params(max_tokens=2.5)}, r"SamplingParams.max_tokens=2.5: "),
    ({"sampling_params": changed_params(temprature=1)}, "'temprature'; did you mean 'temperature'"),
    ({"sampling_params": SamplingParams.model_construct(stop=5)}, "SamplingParams.stop=5: "),
    ({"retention": "x"}, "retention: 'x' is a str; give a KvCacheRetentionConfig"),
    ({"retention": {"priority": 5}}, "KvCacheRetentionConfig: unknown field 'priority'"),
    (
        {"retention": KvCacheRetentionConfig().model_copy(update={"decode_duration_ms": "1 h"})},
        "KvCacheRetentionConfig.decode_duration_ms='1 h': ",
    ),
    ({"cache_salt": "a\udc80"}, r"cache_salt: '\\udc80' at position 1 is half of a surrogate"),
    ({"cache_salt": ""}, "cache_salt: '' must not be empty"),
    ({"cache_salt": 5}, "cache_salt: 5 must be a string, or None"),
    ({"cache_salt": "s" * 1025}, r"cache_salt: 's{79}\.\.\. has 1,025 characters; give 1 to 1,024"),
    ({"lora_id": 1.5}, "lora_id: 1.5 is a float; give an integer, a string, or None"),
    ({"lora_id": [1]}, r"lora_id: \[1\] is a list; give an integer"),
    ({"lora_id": True}, "lora_id: True is a bool; give an integer"),
    ({"lora_id": "\ud8ff"}, "lora_id: .* is half of a surrogate pair"),
    ({"extra_key": {}}, "extra_key: {} is a dict; give an integer"),
]


@pytest.mark.parametrize(
    ("method", "cargo", "message"),
    [
        *(("generate", *bad) for bad in BAD_CARGO),
        *((method, *bad) for method in ("submit", "stream") for bad in BAD_CARGO[::5]),
    ],
)
def test_what_a_request_carries_is_checked_on_its_callers_thread(llm, method, cargo, message):
    with pytest.raises(ConfigurationError, match=message):
        getattr(llm, method)([1, 2], **cargo)
    # And it did not end the engine for others.
    assert llm.generate([1, 2])[0].finish_reason == "length"


@pytest.mark.parametrize("params", ["x", {1: 2}, [("a", 1)]])
def test_kv_transfer_params(llm, params):
    with pytest.raises(ConfigurationError, match=r"kv_transfer_params: .* is no dict with strings"):
        llm.submit([1], kv_transfer_params=params)


def test_huge_numbers_are_numbers(llm):
    params = SamplingParams(
        temperature=1.0, top_k=10**30, seed=10**40, stop_token_ids=(10**30,), max_tokens=2
    )
    keep = TokenRangeRetentionConfig(token_start=10**30, priority=50, duration_ms=1e300)
    retention = KvCacheRetentionConfig(token_range_retention_configs=(keep,))
    assert len(llm.generate([1, 2], params, retention=retention)[0].output_token_ids) <= 2


@pytest.mark.parametrize(
    ("method", "keyword", "message"),
    [
        ("generate", "sampling_parms", "did you mean 'sampling_params'"),
        ("generate", "salt", "did you mean 'cache_salt'"),
        ("submit", "kv_params", "did you mean 'kv_transfer_params'"),
        ("stream", "retentoin", "did you mean 'retention'"),
    ],
)
def test_an_unknown_argument_of_a_request(llm, method, keyword, message):
    expected = f"LLM.({method}|submit): unknown argument '{keyword}'; {message}"
    with pytest.raises(ConfigurationError, match=expected):
        getattr(llm, method)([1], **{keyword: None})


def test_settings_stay_as_they_are():
    config = KvCacheConfig()
    expected = "KvCacheConfig: cannot change max_tokens to 5: .*model_copy"
    with pytest.raises(ConfigurationError, match=expected):
        config.max_tokens = 5
    with pytest.raises(ConfigurationError, match="unknown field 'max_tokns'; did you mean 'max_to"):
        config.max_tokns = 5
    with pytest.raises(ConfigurationError, match="cannot change dtype to nothing"):
        del config.dtype
    assert config == KvCacheConfig()
    store = KvCacheConnectorConfig(url="memory:")
    with pytest.raises(ConfigurationError) as caught:
        store.url = "redis://:hunter2@host"
    assert "hunter2" not in str(caught.value)


def test_one_bad_prompt_starts_none(llm):
    before = llm.stats().finished_requests
    with pytest.raises(ConfigurationError):
        llm.generate([[1, 2], []])
    llm.generate([1, 2])
    assert llm.stats().finished_requests == before + 1


def test_a_callers_array_may_change_afterwards(llm):
    prompt = np.arange(1, 50, dtype=np.int32)
    handle = llm.submit(prompt, SamplingParams(max_tokens=8))
    prompt[:] = 0
    assert handle.result().prompt_token_ids == tuple(range(1, 50))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float31"}, "dtype: 'float31' is unknown; did you mean 'float32'"),
        ({"device": "abacus"}, "device: 'abacus' is unknown"),
        ({"max_num_tokens": 0}, "max_num_tokens: 0 must be at least 1"),
        ({"max_batch_size": 0}, "max_batch_size: 0 must be at least 1"),
        ({"kv_cache": KvCacheConfig(dtype="float16")}, "kv_cache.dtype: 'float16' differs"),
        ({"connector": "dosk:///tmp/x"}, "dosk"),
        (
            {"connector": Path("/var/kv")},
            "connector: .*Path.'/var/kv'. is a path; give a store's U",
        ),
        ({"connector": 5}, "connector: 5 is a int; give a KvCacheConnectorConfig"),
        ({"connector": {"ulr": "memory:"}}, "KvCacheConnectorConfig: unknown field 'ulr'; did you"),
        (
            {"connector": {}},
            "KvCacheConnectorConfig: give url, backend, transfer, or connector_module",
        ),
        ({"kv_cache": 5}, "kv_cache: 5 is a int; give a KvCacheConfig"),
        ({"kv_cache": {"max_tokns": 5}}, "KvCacheConfig: unknown field 'max_tokns'; did you mean"),
        ({"kv_cache": {"max_tokens": "many"}}, "KvCacheConfig.max_tokens='many': "),
        (
            {"kv_cache": KvCacheConfig().model_copy(update={"tokens_per_block": 3})},
            "KvCacheConfig.tokens_per_block=3: must be a power of two",
        ),
        ({"kv_cach": None}, r"LLM.__init__: unknown argument 'kv_cach'; did you mean 'kv_cache'"),
        ({"max_num_tokens": "9"}, "max_num_tokens: '9' must be an integer, at least 1"),
        (
            {"max_logprobs": "9"},
            "max_logprobs: '9' must be at least 0, or -1: all; give an integer",
        ),
        ({"max_batch_size": 2.5}, "max_batch_size: 2.5 must be an integer, at least 1"),
        ({"dtype": None}, "dtype: 'None' is unknown"),
        ({"speculative": {"tokens": 5}}, "NgramSpeculation: unknown field 'tokens'"),
        ({"kv_cache_manager": "mine"}, "kv_cache_manager: 'mine' is a str; give a callable"),
        (
            {"connector": "memory:", "kv_cache": KvCacheConfig(enable_block_reuse=False)},
            "enable_block_reuse=False",
        ),
    ],
)
def test_settings(llama, options, message):
    with pytest.raises(ConfigurationError, match=message):
        LLM(llama, **options)


@pytest.mark.parametrize("field", ["max_attention_window", "pool_ratio"])
def test_an_empty_list_of_windows(field):
    with pytest.raises(ConfigurationError, match=rf"KvCacheConfig.{field}=\[\]: "):
        KvCacheConfig(**{field: []})


@pytest.mark.parametrize("model", [None, 5, ["a"]])
def test_what_is_no_directory(model):
    with pytest.raises(ConfigurationError, match=r"model: .* is a .*; give the directory of a mod"):
        LLM(model)


def test_torchs_own_dtype_and_device(llama):
    cache = KvCacheConfig(max_tokens=64)
    with LLM(llama, kv_cache=cache, dtype=torch.float64, device=torch.device("cpu")) as llm:
        assert llm.layout.dtype == torch.float64


def test_no_such_directory(tmp_path):
    with pytest.raises(ConfigurationError, match=r"model: '.*nowhere' is not a directory; give"):
        LLM(tmp_path / "nowhere")


def test_a_directory_without_a_model(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        LLM(tmp_path)


def test_a_model_without_weights(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        LLM(tmp_path / "model")


def test_a_model_without_a_tokenizer_takes_token_ids(llama, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(llama, model, ignore=shutil.ignore_patterns("tokenizer*"))
    with LLM(model, kv_cache=KvCacheConfig(max_tokens=256)) as llm:
        assert llm.tokenizer is None
        output = llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))[0]
        assert len(output.output_token_ids) == 4
        assert output.output_text == ""
        with pytest.raises(ConfigurationError, match="prompt: text needs a tokenizer"):
            llm.generate("text")
        with pytest.raises(ConfigurationError, match="stop: strings need a tokenizer"):
            llm.generate([1], SamplingParams(stop=("x",)))


def changed(llama, target, **settings):
    shutil.copytree(llama, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | settings))
    return target


def test_dynamic_rope_is_served_within_its_original_length(llama, tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    model = changed(llama, tmp_path / "model", rope_parameters=rope)
    with LLM(model, kv_cache=KvCacheConfig(max_tokens=256)) as llm:
        llm.generate([1] * 60, SamplingParams(max_tokens=4))
        with pytest.raises(ConfigurationError, match=r"63 positions \(the original length of"):
            llm.generate([1] * 60, SamplingParams(max_tokens=5))


def test_layers_of_unknown_kind_are_refused(model_of, tmp_path):
    kinds = ["chunked_attention"] * 3
    model = changed(model_of("qwen3"), tmp_path / "model", layer_types=kinds)
    with pytest.raises(UnsupportedModel, match="layers of type chunked_attention are not served"):
        LLM(model)
