"""Scripts and connectors written for TensorRT-LLM, with its names, arguments and results."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from datetime import timedelta
from importlib import import_module

import pytest

import kvconnect
from kvconnect import ConfigurationError
from kvconnect.integrations import trtllm_shim
from kvconnect.integrations.trtllm_shim import modules
from kvconnect.integrations.trtllm_shim.sampling_params import SamplingParams
from kvconnect.integrations.trtllm_shim.settings import KvCacheConnectorConfig, LlmOptions

TEXT = "Clients of another engine run here. " * 4
CACHE = {"tokens_per_block": 16, "max_tokens": 1024}


@pytest.fixture
def llm(installed, tiny):
    from tensorrt_llm import LLM

    with LLM(model=str(tiny), kv_cache_config=CACHE) as llm:
        yield llm


def test_prompts_are_divided_only_if_that_is_asked_for(installed, tiny):
    from tensorrt_llm import LLM

    params = SamplingParams(max_tokens=4)
    prompt = list(range(1, 42))
    with LLM(str(tiny), kv_cache_config=CACHE) as whole:
        expected = whole.generate(prompt, params).outputs[0].token_ids
    small = {"kv_cache_config": CACHE, "max_num_tokens": 40}
    with LLM(str(tiny), **small) as llm:
        for call in (llm.generate, llm.generate_async):
            with pytest.raises(ConfigurationError, match=r"41 tokens.*max_num_tokens=40.*=True"):
                call(prompt, params)
        assert llm.generate(prompt[:40], params).outputs[0].token_ids
    with LLM(str(tiny), **small, enable_chunked_prefill=True) as llm:
        assert llm.generate(prompt, params).outputs[0].token_ids == expected


# ---------------------------------------------------------------- names


def test_nothing_is_answered_before_it_is_installed(clean_modules):
    with pytest.raises(ModuleNotFoundError):
        import_module("tensorrt_llm")


@pytest.mark.parametrize("name", modules.MODULES)
def test_every_name_of_every_module_is_there(installed, name):
    module = import_module(name)
    assert module.__name__ == name
    for inner in modules.MODULES[name]:
        assert getattr(module, inner) is not None
        assert inner in dir(module)


def test_both_paths_of_the_connector_give_the_same_classes(installed):
    old = import_module("tensorrt_llm._torch.pyexecutor.kv_cache_connector")
    new = import_module("tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector")
    for name in ("KvCacheConnectorScheduler", "KvCacheConnectorWorker", "SchedulerOutput"):
        assert getattr(old, name) is getattr(new, name) is getattr(kvconnect, name)


def test_modules_are_reached_as_attributes_too(installed):
    import tensorrt_llm
    import tensorrt_llm.llmapi.llm_args

    assert tensorrt_llm.llmapi.llm_args.TorchLlmArgs is tensorrt_llm.TorchLlmArgs
    assert import_module("tensorrt_llm.logger").logger is tensorrt_llm.logger
    assert tensorrt_llm.__version__.startswith("1.4.")
    assert (tensorrt_llm.mpi_rank(), tensorrt_llm.mpi_world_size()) == (0, 1)


def test_what_is_not_answered_is_not_found(installed):
    with pytest.raises(ModuleNotFoundError, match=r"tensorrt_llm\.serve"):
        import_module("tensorrt_llm.serve")
    with pytest.raises(ImportError, match="cannot import name 'BuildConfig'"):
        from tensorrt_llm import BuildConfig  # noqa: F401  it is to fail


def test_installing_twice_changes_nothing(installed):
    before = sys.modules["tensorrt_llm"]
    trtllm_shim.install()
    assert sys.modules["tensorrt_llm"] is before


@pytest.mark.parametrize("imported", [False, True])
def test_it_refuses_where_tensorrt_llm_itself_is(clean_modules, tmp_path, monkeypatch, imported):
    package = tmp_path / "tensorrt_llm"
    package.mkdir()
    (package / "__init__.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    if imported:
        import_module("tensorrt_llm")
    with pytest.raises(ConfigurationError, match=rf"is installed \({package}.*hide it"):
        trtllm_shim.install()
    assert import_module("tensorrt_llm").real


def test_installing_imports_no_engine():
    source = (
        "import sys\n"
        "from kvconnect.integrations import trtllm_shim\n"
        "trtllm_shim.install()\n"
        "import tensorrt_llm.llmapi\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


# ---------------------------------------------------------------- answers


def test_answers_are_those_of_kvconnect_in_the_other_shape(llm, tiny):
    """Without parameters they are greedy, and of 32 tokens."""
    with kvconnect.LLM(tiny) as plain:
        [expected] = plain.generate([TEXT], kvconnect.SamplingParams(max_tokens=32))
    assert SamplingParams is import_module("tensorrt_llm").SamplingParams
    [output] = llm.generate([TEXT], use_tqdm=False)
    [answer] = output.outputs
    assert answer.text == expected.output_text
    assert answer.token_ids == list(expected.output_token_ids)
    assert answer.length == len(answer.token_ids)
    assert answer.finish_reason == expected.finish_reason
    assert (output.prompt, output.finished) == (TEXT, True)
    assert output.prompt_token_ids == list(expected.prompt_token_ids)


def test_one_prompt_gets_one_output_and_a_list_gets_a_list(llm):
    params = SamplingParams(max_tokens=3, end_id=-1)
    one = llm.generate("text", params)
    same = llm.generate({"prompt": "text"}, params)
    ids = llm.generate({"prompt_token_ids": one.prompt_token_ids}, params)
    flat = llm.generate(one.prompt_token_ids, params)
    listed = llm.generate(["text", {"prompt": "text"}], [params, params])
    outputs = [one, same, ids, flat, *listed]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["text", "text", None, None, "text", "text"]


def test_a_request_can_be_waited_for_awaited_and_iterated_over(llm):
    params = SamplingParams(max_tokens=5, end_id=-1)
    expected = llm.generate(TEXT, params).outputs[0]
    assert llm.generate_async(TEXT, params).result(60).outputs[0] == expected

    async def both():
        awaited = await llm.generate_async(TEXT, params)
        chunks = [one async for one in llm.generate_async(TEXT, params, streaming=True)]
        return awaited, chunks

    awaited, chunks = asyncio.run(both())
    assert awaited.outputs[0] == expected
    assert [one.finished for one in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].outputs[0].token_ids == expected.token_ids
    assert chunks[-1].outputs[0].text == expected.text
    assert "".join(one.outputs[0].text_diff for one in chunks) == expected.text
    new = [token for one in chunks for token in one.outputs[0].token_ids_diff]
    assert new == expected.token_ids


def test_an_abort_is_called_cancelled(llm):
    result = llm.generate_async(TEXT, SamplingParams(max_tokens=300, end_id=-1))
    result.abort()
    assert result.result(60).outputs[0].finish_reason == "cancelled"


def test_retention_and_salt_are_passed_on(llm):
    from tensorrt_llm.llmapi import KvCacheRetentionConfig

    ranges = [
        KvCacheRetentionConfig.TokenRangeRetentionConfig(0, 16, 90, timedelta(seconds=30)),
    ]
    keep = KvCacheRetentionConfig(ranges, decode_retention_priority=20)
    params = SamplingParams(max_tokens=2)
    for salt, reused in (("a", False), ("b", False), ("a", True)):
        output = llm.generate(TEXT, params, kv_cache_retention_config=keep, cache_salt=salt)
        assert (output.engine_output.reused_device_tokens > 0) is reused


def test_after_shutdown_nothing_is_taken_in(llm):
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(kvconnect.errors.EngineClosed):
        llm.generate("text")


# ---------------------------------------------------------------- a connector


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_connector_of_tensorrt_llm_keeps_prompts_over_restarts(
    ranks, installed, tiny, tmp_path, monkeypatch, caplog
):
    from tensorrt_llm import LLM
    from tensorrt_llm.llmapi.llm_args import KvCacheConnectorConfig

    monkeypatch.setenv("PERSISTENT_CLIENT_FOLDER", str(tmp_path))
    config = KvCacheConnectorConfig(
        connector_module="persistent_client",
        connector_scheduler_class="PersistentLeader",
        connector_worker_class="PersistentWorker",
    )
    outputs = []
    for _ in range(2):
        with caplog.at_level(logging.INFO, "tensorrt_llm"):
            llm = LLM(
                model=str(tiny),
                backend="pytorch",
                cuda_graph_config=None,
                kv_cache_config=CACHE,
                kv_connector_config=config,
                tensor_parallel_size=ranks,
            )
            outputs += llm.generate([TEXT], SamplingParams(max_tokens=8))
            llm.shutdown()
    first, second = outputs
    assert first.outputs[0].text == second.outputs[0].text
    whole = len(first.prompt_token_ids) // 16
    assert second.engine_output.reused_store_tokens == min(
        16 * whole, len(first.prompt_token_ids) - 1
    )
    assert import_module("persistent_client").PersistentWorker.loaded == whole
    assert len(list(tmp_path.iterdir())) == ranks * whole
    assert [record.message[:9] for record in caplog.records][-1:] == ["matched 9"]


# ---------------------------------------------------------------- settings


def test_known_connectors_have_names():
    config = KvCacheConnectorConfig(connector="lmcache-mp", server_url="tcp://h:1")
    assert config.connector_module == "lmcache.integration.tensorrt_llm.tensorrt_mp_adapter"
    assert config.connector_scheduler_class == "LMCacheMPKvConnectorScheduler"
    assert config.connector_worker_class == "LMCacheMPKvConnectorWorker"
    assert config.server_url == "tcp://h:1"
    assert "tcp://" not in repr(config)
    with pytest.raises(ConfigurationError, match="lmcache"):
        KvCacheConnectorConfig(connector="lmcash")


def test_settings_may_be_dicts_and_none_is_the_default():
    cache = {"enable_block_reuse": True, "host_cache_size": None, "onboard_blocks": True}
    options = LlmOptions(
        kv_cache_config=cache,
        kv_connector_config={"connector": "kvbm"},
        scheduler_config={"capacity_scheduler_policy": "max_utilization"},
    )
    assert options.kv_cache_config.host_cache_size == 0
    assert options.kv_connector_config.connector_worker_class == "DynamoKVBMConnectorWorker"
    assert options.scheduler_config.capacity_scheduler_policy.value == "max_utilization"
    assert LlmOptions(kv_cache_config=kvconnect.KvCacheConfig()).kv_cache_config.tokens_per_block


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"kv_cache_confg": None}, "did you mean 'kv_cache_config'"),
        ({"load_fromat": "auto"}, "did you mean 'load_format'"),
        ({"tensor_parallel_size": 0}, r"tensor_parallel_size=0"),
        ({"pipeline_parallel_size": 2}, r"pipeline_parallel_size=2"),
        ({"speculative_config": object()}, "speculative_config"),
        ({"trust_remote_code": True}, "trust_remote_code=True"),
        ({"kv_cache_config": {"tokens_per_blok": 32}}, "did you mean 'tokens_per_block'"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(given, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        LlmOptions(**given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"temperature": 0, "max_tokens": 32}),
        ({"top_k": 1, "temperature": 3.0}, {"temperature": 0}),
        ({"top_p": 0.0, "temperature": 3.0}, {"temperature": 0}),
        ({"top_k": 5}, {"temperature": 1, "top_k": 5, "top_p": 1}),
        ({"top_p": 0.5}, {"temperature": 1, "top_k": 0, "top_p": 0.5}),
        ({"temperature": 0.5}, {"temperature": 0.5, "top_k": 0, "top_p": 1}),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": ["A", "B"], "stop_token_ids": [3]}, {"stop": ("A", "B"), "stop_token_ids": (3,)}),
        ({"end_id": 7, "pad_id": 0}, {"stop_token_ids": (7,), "ignore_eos": False}),
        ({"end_id": -1}, {"stop_token_ids": (), "ignore_eos": True}),
        ({"seed": 4, "temperature": 1.0, "ignore_eos": True}, {"seed": 4, "ignore_eos": True}),
        (
            {"min_tokens": 3, "repetition_penalty": 1.5},
            {"min_tokens": 3, "repetition_penalty": 1.5},
        ),
        ({"n": 2, "best_of": 2, "temperature": 1.0}, {"n": 2, "temperature": 1}),
        ({"min_p": 0.2}, {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0.2}),
        ({"min_p": 1.0, "temperature": 3.0}, {"temperature": 0}),
        ({"min_p": 0.0}, {"temperature": 0}),
        (
            {"presence_penalty": 0.0, "frequency_penalty": 0.0, "prompt_logprobs": 0},
            {"presence_penalty": 0, "frequency_penalty": 0, "prompt_logprobs": None},
        ),
    ],
)
def test_sampling_parameters_mean_the_same(given, expected):
    made = SamplingParams(**given).for_engine()
    assert {name: getattr(made, name) for name in expected} == expected


def test_log_probabilities_are_given_where_they_are_asked_for(llm):
    asked = SamplingParams(max_tokens=4, logprobs=2)
    [whole] = llm.generate(TEXT, asked).outputs
    pairs = list(zip(whole.token_ids, whole.logprobs, strict=True))
    assert len(pairs) == 4
    assert whole.cumulative_logprob == sum(each[token].logprob for token, each in pairs)
    *_, last = llm.generate_async(TEXT, asked)
    assert [list(each) for each in last.outputs[0].logprobs] == [list(each) for _, each in pairs]
    assert last.outputs[0].cumulative_logprob == pytest.approx(whole.cumulative_logprob, abs=1e-3)
    assert llm.generate(TEXT, SamplingParams(max_tokens=1)).outputs[0].logprobs == []


def test_several_completions_are_answered_with_all_of_them(llm, tiny):
    asked = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=5, end_id=-1)
    with kvconnect.LLM(tiny) as plain:
        [expected] = plain.generate([TEXT], asked.for_engine())
    whole = llm.generate(TEXT, asked)
    assert [one.index for one in whole.outputs] == [0, 1]
    assert [one.token_ids for one in whole.outputs] == [
        list(one.token_ids) for one in expected.outputs
    ]
    assert whole.outputs[0].token_ids != whole.outputs[1].token_ids
    chunks = list(llm.generate_async(TEXT, asked))
    assert [one.finished for one in chunks] == [False] * (len(chunks) - 1) + [True]
    for index, same in enumerate(whole.outputs):
        answers = [one.outputs[index] for one in chunks]
        assert (answers[-1].token_ids, answers[-1].text) == (same.token_ids, same.text)
        assert [token for one in answers for token in one.token_ids_diff] == same.token_ids
        assert "".join(one.text_diff for one in answers) == same.text
        assert answers[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"use_beam_search": True}, "does not have it"),
        ({"top_p_decay": 0.5}, "does not have it"),
        ({"best_of": 2}, "does not have it"),
        ({"presence_penalty": 0.5}, "counts the tokens of the prompt"),
        ({"frequency_penalty": 0.5}, "counts the tokens of the prompt"),
        ({"prompt_logprobs": 2}, "behind each token"),
    ],
)
def test_sampling_that_would_mean_something_else_is_refused_by_name(given, reason):
    [(name, value)] = given.items()
    complaint = rf"SamplingParams\.{name}={value}: .*{reason}.*; leave it at (None|False)"
    with pytest.raises(ConfigurationError, match=complaint):
        SamplingParams(**given).for_engine()


def test_arguments_that_would_change_an_answer_are_refused(llm, tiny):
    for complaint, ask in {
        "lora_request": lambda: llm.generate("text", lora_request=object()),
        "unknown argument 'cache_slat'.*'cache_salt'": lambda: llm.generate("text", cache_slat="x"),
        "give SamplingParams": lambda: llm.generate("text", {"max_tokens": 3}),
        "'prompt' or 'prompt_token_ids'": lambda: llm.generate({"text": "x"}),
        "tokenizer: '/other'": lambda: type(llm)(tiny, "/other"),
    }.items():
        with pytest.raises(ConfigurationError, match=complaint):
            ask()


def test_the_log_has_levels_and_says_some_things_once(installed, caplog):
    from tensorrt_llm import logger

    level = logging.getLogger("tensorrt_llm").level
    try:
        logger.set_level("verbose")
        assert logging.getLogger("tensorrt_llm").level == logging.DEBUG
        for number in range(2):
            logger.warning_once(f"warned {number}", key="test")
            logger.info_once("informed")
        assert caplog.messages == ["warned 0", "informed"]
    finally:
        logging.getLogger("tensorrt_llm").setLevel(level)


# ---------------------------------------------------------------- the page


def test_the_page_lists_every_name_that_is_answered(repository):
    page = (repository / "docs/engines.md").read_text(encoding="utf-8")
    for module, names in modules.MODULES.items():
        if names:
            assert f"`{module}`" in page
        assert not [name for name in names if f"`{name}`" not in page]
