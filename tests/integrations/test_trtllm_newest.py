"""Connectors written for TensorRT-LLM's main branch, in kvconnect's engine through the shim."""

from __future__ import annotations

from importlib import import_module

import pytest

from kvconnect.errors import ConfigurationError, ConnectorContractError
from kvconnect.integrations.trtllm_shim.process import valid_page_slots
from kvconnect.integrations.trtllm_shim.settings import KvCacheConnectorConfig, LlmOptions

PROMPT = list(range(1, 71))
LAYOUTS = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_layout"


@pytest.fixture
def open_llm(installed, tiny):
    """Makes an engine with classes of ``newest_client``."""
    from tensorrt_llm import LLM

    def make(leader: str = "NewestLeader", worker: str = "NewestWorker"):
        config = KvCacheConnectorConfig(
            connector_module="newest_client",
            connector_scheduler_class=leader,
            connector_worker_class=worker,
        )
        cache = {"tokens_per_block": 16, "max_tokens": 1024}
        return LLM(str(tiny), kv_cache_config=cache, kv_connector_config=config, dtype="float64")

    return make


def test_a_connector_that_could_reserve_prefixes_is_asked_as_before(open_llm):
    from tensorrt_llm import SamplingParams

    params = SamplingParams(max_tokens=8)
    client = import_module("newest_client")
    client.BLOCKS.clear()
    client.CALLS.clear()
    outputs = []
    for salt in (None, None, "other"):
        with open_llm() as llm:
            outputs.append(llm.generate(PROMPT, params, cache_salt=salt))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.engine_output.reused_store_tokens for output in outputs] == [0, 64, 0]
    assert client.CALLS == ["register_kv_caches", "wait_for_initialization"] * 3


@pytest.mark.planted("other-interface", "engine", "refused")
@pytest.mark.parametrize(
    ("classes", "error", "complaint"),
    [
        (
            {"worker": "OtherFormWorker"},
            ConfigurationError,
            r"register_kv_cache_layout: 'groups' is of TensorRT-LLM's KvCacheLayout; kvconnect's",
        ),
        (
            {"leader": "OtherFormLeader"},
            ConnectorContractError,
            r"does not define update_state_after_alloc; it has .*_by_layer_group, TensorRT-LLM's",
        ),
    ],
)
def test_a_connector_of_the_other_form_is_refused_with_a_sentence(
    open_llm, classes, error, complaint
):
    with pytest.raises(error, match=complaint):
        open_llm(**classes)


def test_types_of_the_second_cache_manager_are_refused_by_name(installed):
    module = import_module(LAYOUTS)
    assert module.valid_page_slots is valid_page_slots
    for name in ("KvCacheLayout", "KvCacheRegion"):
        with pytest.raises(ConfigurationError, match=rf"{LAYOUTS}\.{name}: describes"):
            getattr(module, name)
    with pytest.raises(AttributeError):
        _ = module.other


def test_places_without_a_block_are_left_out():
    assert list(valid_page_slots([-1, -1, 7, 0, -1])) == [(2, 7), (3, 0)]


@pytest.mark.parametrize(
    ("config", "given", "complaint"),
    [
        (KvCacheConnectorConfig, {"aggressive_prefix_budgeting": True}, "aggressive_prefix_budg"),
        (LlmOptions, {"enable_attention_dp": True}, "enable_attention_dp=True"),
    ],
)
def test_settings_of_main_that_change_what_is_asked_are_refused_by_name(config, given, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        config(**given)
    [name] = given
    assert getattr(config(**{name: False}, **_names(config)), name) is False


def _names(config: type) -> dict[str, str]:
    return {"connector": "kvbm"} if config is KvCacheConnectorConfig else {}
