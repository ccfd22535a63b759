"""kvconnect inside TensorRT-LLM's newer runtime: resets, windows, layouts, prefix loads."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
import trtllm_interface as trt
from trtllm_pair import Pair, T, a_prompt

from kvconnect.digest.doubts import Doubt
from kvconnect.errors import ConfigurationError, UnsupportedModel
from kvconnect.trace import metrics

PROMPT = a_prompt(45)


def restarted(classes, tiny, form: str = "main", **more: object) -> int:
    """Tokens that a new engine computes of the prompt; the runtime checks the KV of the others."""
    with Pair(classes, tiny, form=form, **more) as runtime:
        return runtime.run(trt.Request(90, PROMPT), 1)


def resets() -> float:
    """Requests that were not cached since they came back as others."""
    labels = (("reason", Doubt.REQUEST_RESET.value),)
    return metrics.by_labels().get(labels, {}).get("engine.request.uncached", 0)


# ---------------------------------------------------------------------- requests that start anew


@pytest.mark.planted("request-new-again", "trtllm", "equal")
@pytest.mark.parametrize("asks_again", [True, False])
@pytest.mark.parametrize(("form", "chunk"), [("1.2", 10_000), ("main", 12)])
def test_a_request_that_is_new_again_saves_its_new_blocks(
    classes, configured, tiny, form, chunk, asks_again
):
    configured()
    again = {"asks_again": asks_again, "tells": False}
    with Pair(classes, tiny, form=form) as runtime:
        runtime.run(trt.Request(1, PROMPT), 12, chunk=chunk, reset_after=2, **again)
        runtime.run(trt.Request(2, a_prompt(30, seed=4)), 12, reset_after=9, **again)
    assert restarted(classes, tiny, form) == len(PROMPT) - 40
    with Pair(classes, tiny, form=form) as runtime:
        assert runtime.run(trt.Request(3, a_prompt(30, seed=4)), 1) == 30 - 24


@pytest.mark.planted("request-reset", "trtllm", "equal")
@pytest.mark.parametrize("reset_after", [0, 1, 5])
@pytest.mark.parametrize("asks_again", [True, False])
def test_a_request_that_was_reset_goes_on_with_other_pages(
    classes, configured, tiny, reset_after, asks_again
):
    configured()
    with Pair(classes, tiny, form="main") as runtime:
        request = trt.Request(1, PROMPT)
        runtime.run(request, 20, chunk=16, reset_after=reset_after, asks_again=asks_again)
        attachment = runtime.worker._attachment
        assert attachment._fetched == {}
    assert restarted(classes, tiny) == len(PROMPT) - 40


def test_what_was_fetched_for_a_request_that_is_reset_is_dropped(classes, configured, tiny):
    configured()
    with Pair(classes, tiny) as runtime:
        runtime.run(trt.Request(1, PROMPT), 1)
        assert runtime.worker._attachment._access.flush(60)
        request = trt.Request(2, PROMPT)
        assert runtime.scheduler.get_num_new_matched_tokens(request, 0) == (40, False)
        runtime.scheduler.update_state_after_alloc(request, [3, 4, 5, 6, 7, 8])
        runtime.scheduler.request_reset(request)
        attachment = runtime.worker._attachment
        assert attachment._fetched == {}
        assert runtime.scheduler.build_connector_meta(trt.SchedulerOutputMain()) is None
        runtime.scheduler.request_reset(trt.Request(77, PROMPT))  # of one that it never saw


def test_a_request_that_comes_back_with_other_tokens_is_not_cached(classes, configured, tiny):
    configured()
    before = resets()
    with Pair(classes, tiny) as runtime:
        request = trt.Request(1, PROMPT)
        assert runtime.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        data = trt.RequestData["1.4"](1, a_prompt(45, seed=9), [1, 2, 3, 4, 5, 6], 0, 45)
        output = trt.SchedulerOutputMain(new_requests=[data])
        assert runtime.scheduler.build_connector_meta(output) is None
        assert runtime.scheduler.build_connector_meta(output) is None
        assert runtime.scheduler.request_finished(request, []) is False
    assert resets() == before + 1
    assert restarted(classes, tiny) == len(PROMPT)


# ---------------------------------------------------------------------- windows


@pytest.mark.planted("blocks-passed-by-window", "trtllm", "equal")
@pytest.mark.parametrize("window", [9, 20])
@pytest.mark.parametrize(("form", "chunk"), [("1.2", 12), ("main", 10_000), ("main", 12)])
def test_blocks_that_a_window_has_passed_are_neither_saved_nor_loaded(
    classes, configured, tiny, form, window, chunk
):
    configured()
    for number, computed in enumerate([45 + 39, 44, 44]):
        with Pair(classes, tiny, form=form, window=window) as runtime:
            request = trt.Request(number, PROMPT)
            assert runtime.run(request, 40, chunk=chunk) == computed
    with Pair(classes, tiny, form=form, window=window) as runtime:
        # Reset where the window has passed its beginning: the rest comes from the store.
        runtime.run(trt.Request(9, PROMPT), 40, chunk=chunk, reset_after=20, asks_again=False)


# ---------------------------------------------------------------------- the form of the interface


def test_what_main_calls_besides_has_the_recorded_form(classes):
    scheduler, worker = classes
    [request] = list(inspect.signature(scheduler.request_reset).parameters.values())[1:]
    assert (request.name,) == trt.SCHEDULER_MAIN["request_reset"]
    [layout] = list(inspect.signature(worker.register_kv_cache_layout).parameters.values())[1:]
    assert {one.kind for one in (request, layout)} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    # All of these or none: with none of them nothing is reserved, as nothing is fetched for it.
    for name in ("reserve_prefix", "release_prefix_reservation", "cancel_load"):
        assert not hasattr(scheduler, name)
    assert not hasattr(worker, "get_finished_prefix_loads")
    assert not getattr(scheduler, "supports_attention_dp", False)


@pytest.mark.planted("other-interface", "trtllm", "refused")
@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"groups": 2}, "KV in 2 layer groups and 2 regions; kvconnect is built for the form of"),
        ({"regions": 2}, "KV in 1 layer groups and 2 regions; .*use_kv_cache_manager_v2=False"),
        ({"has_tensor": False}, "the pool's SimpleNamespace makes no tensor of it"),
    ],
)
def test_a_layout_that_is_not_one_tensor_is_refused_with_a_sentence(
    classes, configured, tiny, parts, complaint
):
    configured()
    worker = classes[1](trt.llm_args(tiny, T))
    pool = torch.zeros(8, 2, 2, T * 6)
    with pytest.raises(UnsupportedModel, match=f"register_kv_cache_layout: {complaint}"):
        worker.register_kv_cache_layout(trt.layout_of(pool, T, **parts))
    worker.register_kv_cache_layout(trt.layout_of(pool, T))
    worker.shutdown()


@pytest.mark.planted("other-interface", "trtllm", "refused")
def test_loads_of_prefixes_that_were_never_reserved_are_refused(classes, configured, tiny):
    configured()
    load = SimpleNamespace(**dict.fromkeys(trt.PREFIX_LOAD_MAIN))
    output = trt.SchedulerOutputMain(prefix_loads=[load])
    with (
        Pair(classes, tiny) as runtime,
        pytest.raises(ConfigurationError, match="prefix_loads: kvconnect reserves no prefixes"),
    ):
        runtime.scheduler.build_connector_meta(output)
