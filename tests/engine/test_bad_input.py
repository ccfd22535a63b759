"""Bad input: the message names the field, the value and what to do."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from kvconnect import LLM, KvCacheConfig, SamplingParams
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


def test_one_bad_prompt_starts_none(llm):
    before = llm.stats().finished_requests
    with pytest.raises(ConfigurationError):
        llm.generate([[1, 2], []])
    llm.generate([1, 2])
    assert llm.stats().finished_requests == before + 1


def test_params_of_another_number(llm):
    with pytest.raises(ConfigurationError, match="sampling_params: 2 were given for 3 prompts"):
        llm.generate([[1], [2], [3]], [SamplingParams()] * 2)


def test_an_empty_salt(llm):
    with pytest.raises(ConfigurationError, match="cache_salt: '' must not be empty"):
        llm.generate([1], cache_salt="")


def test_a_prompt_of_a_single_list_or_array(llm):
    assert llm.generate([1, 2, 3])[0].prompt_token_ids == (1, 2, 3)
    assert llm.generate(np.array([1, 2, 3]))[0].prompt_token_ids == (1, 2, 3)
    assert llm.generate([]) == []


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
            {"connector": "memory:", "kv_cache": KvCacheConfig(enable_block_reuse=False)},
            "enable_block_reuse=False",
        ),
    ],
)
def test_settings(llama, options, message):
    with pytest.raises(ConfigurationError, match=message):
        LLM(llama, **options)


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
        llm.generate([1] * 60, SamplingParams(max_tokens=5))
        with pytest.raises(ConfigurationError, match=r"64 positions \(the original length of"):
            llm.generate([1] * 60, SamplingParams(max_tokens=6))


def test_layers_of_unknown_kind_are_refused(model_of, tmp_path):
    kinds = ["chunked_attention"] * 3
    model = changed(model_of("qwen3"), tmp_path / "model", layer_types=kinds)
    with pytest.raises(UnsupportedModel, match="layers of type chunked_attention are not served"):
        LLM(model)
