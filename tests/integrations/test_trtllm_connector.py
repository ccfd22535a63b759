"""kvconnect inside TensorRT-LLM: against its recorded interface, and under a small runtime."""

from __future__ import annotations

import gc
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trtllm_interface as trt
from sglang_pools import damage
from trtllm_pair import NEWER, OLDER, ROOM, Pair, T, a_prompt, forget_classes

from kvconnect.backends.disk.store import DiskBackend
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.connector.worker import KvCacheConnectorWorker
from kvconnect.errors import ConfigurationError, UnsupportedModel
from kvconnect.keys import salt_of, salt_tag
from kvconnect.trace import metrics

# ---------------------------------------------------------------------- the interface


@pytest.mark.parametrize("classes", [NEWER, OLDER], indirect=True)
def test_every_method_has_the_recorded_form(classes):
    for ours, recorded in zip(classes, (trt.SCHEDULER, trt.WORKER), strict=True):
        assert not inspect.isabstract(ours)
        for name, parameters in recorded.items():
            own = list(inspect.signature(getattr(ours, name)).parameters.values())[1:]
            assert tuple(one.name for one in own) == parameters
            assert {one.kind for one in own} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    for name in trt.WORKER_CONCRETE:
        assert name not in vars(classes[1])


def test_without_tensorrt_llm_the_bases_are_kvconnects_own(clean_modules):
    forget_classes()
    import kvconnect.integrations.trtllm as room

    assert issubclass(room.KvConnectScheduler, KvCacheConnectorScheduler)
    assert issubclass(room.KvConnectWorker, KvCacheConnectorWorker)
    with pytest.raises(AttributeError):
        _ = room.Connector
    forget_classes()


# ---------------------------------------------------------------------- right KV


@pytest.mark.parametrize("kv_factor", [2, 1])
def test_a_restarted_engine_computes_what_no_whole_block_holds(
    classes, configured, tiny, kv_factor
):
    configured()
    prompt = a_prompt(45)
    with Pair(classes, tiny, kv_factor=kv_factor) as runtime:
        first = trt.Request(1, prompt)
        assert runtime.run(first, 10) == 54
    with Pair(classes, tiny, kv_factor=kv_factor) as runtime:
        assert runtime.run(trt.Request(7, prompt), 10) == 54 - 40
        longer = trt.Request(8, first.get_tokens(0) + a_prompt(7, seed=2))
        assert runtime.run(longer, 2) == len(longer.get_tokens(0)) - 1 - 48


def test_chunks_and_prompts_that_fill_their_blocks(classes, configured, tiny):
    configured()
    with Pair(classes, tiny) as runtime:
        assert runtime.run(trt.Request(1, a_prompt(48)), 3, chunk=16) == 50
        assert runtime.worker._attachment._access.flush(60)
        # The last token is always computed, and with it its block.
        assert runtime.run(trt.Request(2, a_prompt(48)), 3, chunk=16) == 10
        # Blocks of the device before it, aligned and not.
        ask = runtime.scheduler.get_num_new_matched_tokens
        assert ask(trt.Request(3, a_prompt(48)), 16) == (24, False)
        assert ask(trt.Request(4, a_prompt(48)), 13) == (0, False)


@pytest.mark.parametrize("form", trt.REQUEST_DATA)
def test_every_form_of_request_data_is_understood(classes, configured, tiny, form):
    configured()
    prompt, chunk = a_prompt(45), 12
    salts = ("cache_salt_id", 5, 6) if form == "between" else ("cache_salt", "a", "b")
    salt, one, other = salts
    with Pair(classes, tiny, form=form) as runtime:
        assert runtime.run(trt.Request(1, prompt, **{salt: one}), 10, chunk=chunk) == 54
        assert runtime.worker._attachment._access.flush(60)
        assert runtime.run(trt.Request(2, prompt, **{salt: other}), 10, chunk=chunk) == 54
    with Pair(classes, tiny, form=form) as runtime:
        assert runtime.run(trt.Request(3, prompt, **{salt: one}), 10, chunk=chunk) == 54 - 40


@pytest.mark.parametrize(
    ("form", "priority", "saved"), [("1.2", 80, 35), ("1.4", 80, 80), ("1.4", None, 35)]
)
def test_blocks_are_saved_with_the_priorities_that_are_reported(
    classes, configured, tiny, form, priority, saved
):
    configured()
    with Pair(classes, tiny, form=form) as runtime:
        runtime.run(trt.Request(1, a_prompt(45), priority), 10, chunk=12)
        orders = [order for meta in runtime.metas if meta is not None for order in meta.saves]
        assert [block.priority for order in orders for block in order.blocks] == [saved] * 6


def test_a_tenants_salt_is_told_to_the_store(classes, configured, tiny):
    """`prune --salt` finds by it what this engine's requests saved."""
    configured()
    with Pair(classes, tiny) as runtime:
        runtime.run(trt.Request(1, a_prompt(45), cache_salt="a"), 4)
        orders = [order for meta in runtime.metas if meta is not None for order in meta.saves]
        assert {salt_of(order.namespace) for order in orders} == {salt_tag("a")}


def test_a_request_that_is_asked_for_again_before_it_runs(classes, configured, tiny):
    configured()
    prompt = a_prompt(40)
    with Pair(classes, tiny) as runtime:
        runtime.run(trt.Request(1, prompt), 1)
        assert runtime.worker._attachment._access.flush(60)
        again = trt.Request(2, prompt)
        for _ in range(3):
            assert runtime.scheduler.get_num_new_matched_tokens(again, 0) == (32, False)
        assert runtime.run(again, 1) == 8
        attachment = runtime.worker._attachment
        assert attachment._fetched == {}


def test_fewer_blocks_than_tokens_that_were_taken_stop_the_engine(classes, configured, tiny):
    configured()
    prompt = a_prompt(40)
    with Pair(classes, tiny) as runtime:
        runtime.run(trt.Request(1, prompt), 1)
        assert runtime.worker._attachment._access.flush(60)
        request = trt.Request(2, prompt)
        assert runtime.scheduler.get_num_new_matched_tokens(request, 0) == (32, False)
        request.py_num_connector_matched_tokens = 32
        for blocks in ([3, 4, 6], [3, 4, 5, -1], [-1] * 4):
            assert runtime.scheduler.get_num_new_matched_tokens(request, 0) == (32, False)
            with pytest.raises(ConfigurationError, match="took 32 of the promised tokens"):
                runtime.scheduler.update_state_after_alloc(request, blocks)


def test_many_requests_leave_nothing(classes, configured, tiny):
    configured()
    with Pair(classes, tiny) as runtime:
        for number in range(60):
            prompt = a_prompt(20 + number % 7, seed=number % 5)
            runtime.run(trt.Request(number, prompt), 3, abort_after=1 + number % 3)
        attachment = runtime.worker._attachment
        assert (runtime.scheduler._requests, runtime.scheduler._loads) == ({}, {})
        assert (attachment._fetched, attachment.dropped) == ({}, {})
    from kvconnect.integrations.trtllm.attachment import Attachment

    gc.collect()
    assert not Attachment._made


# ---------------------------------------------------------------------- stores that fail


def test_a_damaged_store_is_computed(classes, configured, tiny, tmp_path):
    configured()
    prompt = a_prompt(45)
    with Pair(classes, tiny) as runtime:
        runtime.run(trt.Request(1, prompt), 1)
    damage(tmp_path / "kv")  # in the first block
    with Pair(classes, tiny) as runtime:
        assert runtime.run(trt.Request(2, prompt), 1) == 45
    with Pair(classes, tiny) as runtime:  # dropped, and saved anew
        assert runtime.run(trt.Request(3, prompt), 1) == 5


def test_a_store_that_hangs_stops_the_engine_once(classes, configured, tiny, monkeypatch):
    configured(load_timeout_s=0.3, save_timeout_s=0.3)
    prompt = a_prompt(45)
    with Pair(classes, tiny) as runtime:
        runtime.run(trt.Request(1, prompt), 1)
        assert runtime.worker._attachment._access.flush(60)
        loads = []

        async def hang(self, keys, into, *_):
            import asyncio

            loads.append(keys)
            await asyncio.sleep(3)
            return 0

        monkeypatch.setattr(DiskBackend, "load", hang)
        monkeypatch.setattr(DiskBackend, "load_hashed", hang)
        for number in range(5):
            assert runtime.run(trt.Request(10 + number, prompt), 1) == 45
        assert 0 < len(loads) <= 3  # the pieces of one load


def test_staging_that_is_full_drops_blocks(classes, configured, tiny):
    configured(staging_bytes=16384)
    with Pair(classes, tiny) as runtime:
        assert runtime.run(trt.Request(1, a_prompt(90)), 1) == 90
    with Pair(classes, tiny) as runtime:
        assert runtime.run(trt.Request(2, a_prompt(90)), 1) < 90  # what there was room for


def test_metrics_of_the_process_carry_the_engine_s_name(classes, configured, tiny, monkeypatch):
    monkeypatch.setattr(metrics, "engine", "kvconnect")
    configured()
    with Pair(classes, tiny):
        assert metrics.engine == "trtllm"


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "KVCONNECT_CONFIG: is not set"),
        ("{", "KVCONNECT_CONFIG: is not JSON"),
        ("[]", "object of settings"),
        ("{}", "KVCONNECT_CONFIG.url: is missing"),
        ('{"url": "memory:", "lookup_timeout": 3}', "did you mean 'lookup_timeout_ms'"),
        ('{"url": "memory:", "namespace": "shared"}', "namespace"),
        ('{"url": "memory:", "save_on": "finish"}', "unknown field 'save_on'"),
        ('{"url": "memory:", "producer_timeout_s": 1}', "unknown field 'producer_timeout_s'"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(classes, tiny, monkeypatch, text, complaint):
    if text is None:
        monkeypatch.delenv("KVCONNECT_CONFIG", raising=False)
    else:
        monkeypatch.setenv("KVCONNECT_CONFIG", text)
    for cls in classes:
        with pytest.raises(ConfigurationError, match=complaint):
            cls(trt.llm_args(tiny, T))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"disk://{tmp_path}/kv?capacity=64MiB"


def test_settings_may_come_with_the_arguments(classes, tiny, url):
    args = trt.llm_args(tiny, T)
    args.kv_connector_config.kvconnect = {"url": url}
    classes[0](args)._attachment.close()


@pytest.mark.parametrize("version", trt.CONNECTOR_CONFIG)
def test_the_engine_s_own_settings_need_a_subclass_with_the_field(classes, tiny, url, version):
    config = trt.connector_config(version)
    given = {
        "connector_module": ROOM,
        "connector_scheduler_class": "KvConnectScheduler",
        "connector_worker_class": "KvConnectWorker",
    }
    with pytest.raises(ValueError, match="kvconnect"):
        config(**given, kvconnect={"url": url})

    class WithStore(config):
        kvconnect: dict[str, Any]

    args = trt.llm_args(tiny, T, kv_connector_config=WithStore(**given, kvconnect={"url": url}))
    classes[0](args)._attachment.close()


@pytest.mark.parametrize(
    ("wrong", "error", "complaint"),
    [
        ({"load_format": SimpleNamespace(name="DUMMY")}, ConfigurationError, "load_format='dummy'"),
        (
            {"speculative_config": SimpleNamespace(decoding_type="Eagle")},
            UnsupportedModel,
            "speculative_config: Eagle .* serves NGram",
        ),
        (
            {"speculative_config": SimpleNamespace()},
            UnsupportedModel,
            "speculative_config: .* NGram",
        ),
        ({"kv_cache_config": SimpleNamespace(dtype="nvfp4")}, UnsupportedModel, "scales"),
        (
            {"kv_cache_config": SimpleNamespace(enable_block_reuse=False)},
            ConfigurationError,
            "enable_block_reuse=False: a connector needs it",
        ),
    ],
)
def test_what_it_cannot_do_right_is_refused(classes, configured, tiny, wrong, error, complaint):
    configured()
    for cls in classes:
        with pytest.raises(error, match=complaint):
            cls(trt.llm_args(tiny, T, **wrong))


def test_drafts_that_have_no_model_are_served(classes, configured, tiny):
    configured()
    drafts = SimpleNamespace(decoding_type="NGram")
    classes[0](trt.llm_args(tiny, T, speculative_config=drafts))._attachment.close()


def test_models_pools_and_stores_that_it_cannot_open_are_refused(classes, configured, tiny):
    configured()
    with pytest.raises(ConfigurationError, match="model"):
        classes[0](trt.llm_args(tiny / "none", T))
    worker = classes[1](trt.llm_args(tiny, T))
    with pytest.raises(UnsupportedModel, match="KV pool of shape"):
        worker.register_kv_caches(torch.zeros(4, 2, 2, T * 6 + 1))
    worker.shutdown()
    configured(url="tape:x")
    with pytest.raises(ConfigurationError, match="tape"):
        Pair(classes, tiny)


# ---------------------------------------------------------------------- a whole engine


def test_kvconnects_own_engine_under_tensorrt_llms_names(installed, configured, tiny, tmp_path):
    """The classes on the shim's bases, called by the engine that the shim stands for."""
    forget_classes()
    from tensorrt_llm import LLM, SamplingParams
    from tensorrt_llm.llmapi import KvCacheConfig
    from tensorrt_llm.llmapi.llm_args import KvCacheConnectorConfig

    configured()
    prompt = [token + 1 for token in a_prompt(60)]
    answers, reused = [], []
    for connector in (None, True, True):
        given = {}
        if connector:
            given["kv_connector_config"] = KvCacheConnectorConfig(
                connector_module=ROOM,
                connector_scheduler_class="KvConnectScheduler",
                connector_worker_class="KvConnectWorker",
            )
        llm = LLM(
            model=str(tiny),
            dtype="float64",
            kv_cache_config=KvCacheConfig(tokens_per_block=T, max_tokens=512),
            **given,
        )
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        outputs = llm.generate([prompt, prompt[:30], prompt[10:]], params)
        answers.append([output.outputs[0].token_ids for output in outputs])
        reused.append(outputs[0].engine_output.reused_store_tokens)
        llm.shutdown()
    forget_classes()
    assert answers[0] == answers[1] == answers[2]
    assert reused == [0, 0, 56]
