"""Both halves of `KvConnect` under a stand-in for vLLM, which is not needed for these."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm_configs import attention, engine_config, groups_of
from vllm_stand_in import PROMPT, Open, T, poll, told

from kvconnect.cli.main import main
from kvconnect.connector.pair.messages import WorkerMeta
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.vllm.caches import group_planes
from kvconnect.integrations.vllm.identity import (
    refuse_apart,
    refuse_other_dtype_on_cpu,
    refuse_unserved,
    variant_of,
)
from kvconnect.integrations.vllm.layouts import cache_groups, total_heads
from kvconnect.integrations.vllm.messages import WorkerReport
from kvconnect.integrations.vllm.requests import Roles
from kvconnect.integrations.vllm.scheduler import NUM_TOKENS
from kvconnect.integrations.vllm.stats import CounterSteps
from kvconnect.keys import Shard
from kvconnect.testing.faults.faulty_backend import BACKEND_FAULTS, FaultyBackend
from kvconnect.trace import count, metrics

# ------------------------------------------------------------------ saved, and loaded


@pytest.mark.parametrize("chunk", [100, 6])
def test_what_was_computed_is_loaded(open_engine: Open, chunk):
    engine = open_engine(chunk=chunk)
    first = engine.answer(PROMPT)
    engine.flush()
    second = engine.answer(PROMPT)
    assert first.answer == second.answer == told(engine)
    assert (first.cached, second.cached) == (0, 5 * T)
    engine.check_empty()


def test_of_a_prompt_of_whole_blocks_a_token_is_computed(open_engine: Open):
    """What is loaded may hold the last token, which vLLM computes again."""
    engine = open_engine()
    prompt = PROMPT[: 4 * T]
    engine.answer(prompt)
    engine.flush()
    again = engine.answer(prompt)
    assert (again.cached, again.answer) == (4 * T, told(engine, prompt))
    engine.check_empty()


def test_for_its_last_block_alone_a_prompt_does_not_wait(open_engine: Open):
    engine = open_engine()
    prompt = PROMPT[: 4 * T]
    engine.answer(prompt)
    engine.flush()
    request = engine.submit(prompt, wanted=len(prompt) + 1)
    answers = [poll(engine, request, local * T) for local in range(4)]
    assert answers == [(4 * T, True), (3 * T, True), (2 * T, True), (0, False)]
    engine.run()
    assert request.answer == told(engine, prompt)


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("fault", ["none", "hang"])
def test_a_prompt_of_no_tokens_that_keys_know_is_computed(
    open_engine: Open, store: FaultyBackend, skips, fault
):
    engine = open_engine(lookup_timeout_ms=20)
    store.set(fault)
    prompt = [*PROMPT, 2**40]
    assert engine.answer(prompt, skip_reading_prefix_cache=skips).answer == told(engine, prompt)
    engine.abort(engine.submit(prompt, wanted=len(prompt) + 1))  # before it was scheduled
    assert engine.answer(PROMPT).answer == told(engine)
    store.heal()
    engine.check_empty()


def test_generated_tokens_are_saved_when_they_fill_a_block(open_engine: Open):
    engine = open_engine()
    first = engine.answer(PROMPT, 2 * T)
    engine.flush()
    again = engine.answer(first.all_token_ids[:-1])
    assert again.cached == (len(PROMPT) + 2 * T - 1) // T * T


@pytest.mark.planted("request-reset", "vllm", "equal")
@pytest.mark.parametrize("save_on", ["full", "finish"])
def test_a_preempted_request_is_loaded_again(open_engine: Open, save_on):
    engine = open_engine(save_on=save_on)
    plain = engine.answer(PROMPT, 3 * T, cache_salt="not found")
    request = engine.submit(PROMPT, wanted=len(PROMPT) + 3 * T)
    engine.run(lambda: request.num_tokens == len(PROMPT) + T)
    engine.preempt(request)
    engine.step()
    engine.flush()
    engine.run()
    assert request.all_token_ids == plain.all_token_ids
    if save_on == "full":  # else it is staged when it loses its blocks, and came back at once
        assert request.cached > len(PROMPT) - T
    engine.check_empty()


def test_what_was_computed_before_a_reset_is_what_workers_are_told(open_engine: Open, monkeypatch):
    """In the step that resumes the request: windows have freed blocks up to where it was."""
    engine = open_engine(save_on="finish", chunk=6)
    request = engine.submit(PROMPT, wanted=len(PROMPT) + 3 * T, skip_reading_prefix_cache=True)
    engine.run(lambda: request.num_tokens == len(PROMPT) + T)
    computed = request.num_computed_tokens
    told_of = []
    monkeypatch.setattr(
        engine.worker, "handle_preemptions", lambda meta: told_of.extend(meta.preempted)
    )
    engine.preempt(request)
    engine.step()
    assert request.num_computed_tokens == 6
    assert [tokens for _, tokens in told_of] == [computed]
    engine.run()
    engine.check_empty()


def test_nothing_is_asked_twice_for_one_answer(open_engine: Open, store):
    """VLLM asks as often as it likes; an answer that it does not take changes nothing."""
    engine = open_engine()
    engine.answer(PROMPT)
    engine.flush()
    request = engine.submit(PROMPT, wanted=len(PROMPT) + 1)
    answers = [poll(engine, request) for _ in range(3)]
    assert answers == [(5 * T, True)] * 3
    engine.scheduler.update_state_after_alloc(request, request, 0)  # another connector's
    engine.requests[request.request_id].num_computed_tokens = 0
    engine.run()
    assert request.answer == told(engine)
    engine.check_empty()


# ------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize("fault", [one for one in BACKEND_FAULTS if one not in {"none", "late"}])
def test_no_fault_changes_an_answer(open_engine: Open, store, fault):
    # What hangs is waited for once each; the store is opened within the same time.
    engine = open_engine(lookup_timeout_ms=50, load_timeout_s=0.5, save_timeout_s=0.5)
    engine.answer(PROMPT)
    engine.flush()
    store.set(fault)
    assert engine.answer(PROMPT).answer == told(engine)
    store._operations = frozenset({"load"})
    assert engine.answer(PROMPT).answer == told(engine)
    engine.check_empty()


def test_a_late_lookup_is_not_waited_for(open_engine: Open, store):
    engine = open_engine(lookup_timeout_ms=30)
    engine.answer(PROMPT)
    engine.flush()
    store.set("hang")
    started = time.monotonic()
    answers = [engine.answer(PROMPT) for _ in range(5)]
    assert time.monotonic() - started < 30
    assert [one.cached for one in answers] == [0] * 5


@pytest.mark.parametrize("fault", ["hang", "late"])
def test_an_abort_during_a_load_gives_back_all_blocks_once(open_engine: Open, store, fault):
    engine = open_engine()
    engine.answer(PROMPT)
    engine.flush()
    store._operations = frozenset({"load"})
    store.set(fault)
    request = engine.submit(PROMPT, wanted=len(PROMPT) + 1)
    engine.run(lambda: request.state == "loading")
    engine.abort(request)
    engine.run()
    engine.check_empty()


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_step_that_does_not_end_saves_nothing(open_engine: Open, monkeypatch, tmp_path, error):
    """As when a worker gets SIGTERM in the middle of its forward pass."""
    url = f"disk://{tmp_path}/store?capacity=16MiB"
    engine = open_engine(url=url)

    def fail(*_: object) -> float:
        raise error("in the forward pass")

    engine.submit(PROMPT, wanted=len(PROMPT) + 1)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_compute", fail)
        with pytest.raises(error):
            engine.run()
    engine.flush()
    other = open_engine(url=url)
    assert other.answer(PROMPT).cached == 0


def test_tokens_in_flight_at_an_abort_are_not_computed(open_engine: Open, monkeypatch):
    """VLLM counts those of steps that have not ended; their blocks are not saved."""
    engine = open_engine()
    request = engine.submit(PROMPT, wanted=len(PROMPT) + 9)
    engine.run(lambda: request.num_tokens == len(PROMPT) + 3)
    request.num_in_flight_tokens = 2
    computed = []
    pair = engine.scheduler._scheduler
    plain = pair.request_finished

    def finished(llm, block_ids):
        computed.append(llm.num_computed_tokens)
        return plain(llm, block_ids)

    monkeypatch.setattr(pair, "request_finished", finished)
    counted = request.num_computed_tokens
    engine.abort(request)
    assert computed == [counted - 2]
    engine.run()


def test_tokens_of_a_load_that_failed_are_not_computed(open_engine: Open):
    """Or their blocks would be saved as if they held them."""
    engine = open_engine()
    request = engine.submit(PROMPT, wanted=len(PROMPT) + 9)
    engine.run(lambda: request.num_tokens == len(PROMPT) + 1)
    tracked = engine.scheduler._tracked[request.request_id]
    before = tracked.computed, tracked.num_full
    report = WorkerReport(failed={tracked.llm.request_id: 2 * T})
    output = SimpleNamespace(kv_connector_worker_meta=report, finished_recving=None)
    engine.scheduler.update_connector_output(output)
    assert (tracked.computed, tracked.num_full) == (2 * T, 0)
    tracked.computed, tracked.num_full = before
    engine.run()


@pytest.mark.parametrize("preempted", [False, True])
def test_an_abort_of_a_request_that_does_not_run(open_engine: Open, preempted):
    engine = open_engine()
    request = engine.submit(PROMPT, wanted=len(PROMPT) + 9)
    if preempted:
        engine.run(lambda: request.num_tokens > len(PROMPT) + 1)
        engine.preempt(request)
    engine.abort(request)
    engine.run()
    engine.check_empty()


# ------------------------------------------------------------------ apart, and together


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            {"prompt_embeds": "a tensor"},
            marks=pytest.mark.planted("prompt-embeddings", "vllm", "refused"),
        ),
        {"prompt_token_ids": None},
        pytest.param(
            {"resumable": True},
            marks=pytest.mark.planted("request-new-again", "vllm", "refused"),
        ),
        {"cache_salt": ""},
        {"cache_salt": "\ud800"},
        {"lora_request": SimpleNamespace(lora_int_id=1, lora_path="/no/where", load_inplace=False)},
        {"lora_request": SimpleNamespace(lora_int_id=1, lora_path="/", load_inplace=True)},
    ],
    ids=str,
)
def test_what_cannot_be_told_apart_is_not_cached_and_counted(open_engine: Open, store, more):
    engine = open_engine()
    counted = metrics.snapshot().get("engine.request.uncached", 0)
    for number in (1, 2):
        assert engine.answer(PROMPT, **more).cached == 0
        assert metrics.snapshot()["engine.request.uncached"] == counted + number
    engine.flush()
    assert engine.answer(PROMPT).cached == 0
    engine.check_empty()


def test_without_an_adapter_nothing_is_cached_where_kernels_take_another_requests(
    open_engine: Open, tmp_path
):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"a" * 50)
    lora = SimpleNamespace(lora_int_id=1, lora_path=str(tmp_path), load_inplace=False)
    engine = open_engine(Roles(base_is_apart=False))
    for cached in (0, 5 * T):
        assert engine.answer(PROMPT, lora_request=lora).cached == cached
        assert engine.answer(PROMPT).cached == 0
        engine.flush()
    engine.check_empty()


@pytest.mark.planted("other-salt", "vllm", "key")
@pytest.mark.planted("other-adapter", "vllm", "key")
@pytest.mark.planted("adapter-switched", "vllm", "key")
@pytest.mark.planted("adapter-weights-changed", "vllm", "refused")
def test_salts_and_adapters_are_apart(open_engine: Open, tmp_path: Path):
    def lora(name: str, number: int) -> SimpleNamespace:
        folder = tmp_path / name
        if not folder.exists():
            folder.mkdir()
            (folder / "adapter_config.json").write_text("{}")
            (folder / "adapter_model.safetensors").write_bytes(name.encode() * 50)
        return SimpleNamespace(lora_int_id=number, lora_path=str(folder), load_inplace=False)

    engine = open_engine()
    kinds = [
        {},
        {"cache_salt": "one"},
        {"cache_salt": "two"},
        {"lora_request": lora("a", 1)},
        {"lora_request": lora("b", 2)},
    ]
    for kind in kinds:
        assert engine.answer(PROMPT, **kind).cached == 0
        engine.flush()
    for kind in kinds:
        assert engine.answer(PROMPT, **kind).cached == 5 * T
    # The engine's number means nothing; another file does.
    assert engine.answer(PROMPT, lora_request=lora("a", 7)).cached == 5 * T
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"new" * 50)
    assert engine.answer(PROMPT, lora_request=lora("a", 1)).cached == 0
    assert engine.answer(PROMPT, lora_request=lora("a", 9)).cached == 0
    engine.check_empty()


def adapter_in(folder: Path, number: int, *, load_inplace: bool = False) -> SimpleNamespace:
    if not folder.exists():
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(folder.name.encode() * 50)
    return SimpleNamespace(lora_int_id=number, lora_path=str(folder), load_inplace=load_inplace)


@pytest.mark.planted("adapter-switched", "vllm", "refused")
@pytest.mark.parametrize("in_place", [True, False])
def test_a_number_that_two_adapters_had_names_neither(open_engine: Open, tmp_path: Path, in_place):
    """The engine may have dropped the first, or replaced it, and go on with the second."""
    first, other = tmp_path / "a", tmp_path / "b"
    engine = open_engine()
    for cached in (0, 5 * T):
        assert engine.answer(PROMPT, lora_request=adapter_in(first, 1)).cached == cached
        engine.flush()
    lora = adapter_in(other, 1, load_inplace=in_place)
    assert engine.answer(PROMPT, lora_request=lora).cached == 0
    assert engine.answer(PROMPT, lora_request=adapter_in(first, 1)).cached == 0
    engine.flush()
    assert engine.answer(PROMPT, lora_request=adapter_in(other, 2)).cached == 0
    assert engine.answer(PROMPT, lora_request=adapter_in(first, 3)).cached == 5 * T
    engine.check_empty()


@pytest.mark.planted("adapter-weights-changed", "vllm", "refused")
def test_an_adapter_that_is_loaded_before_a_request_names_it_is_that_of_then(
    open_engine: Open, tmp_path: Path
):
    engine = open_engine()
    engine.scheduler.adapter_loads(adapter_in(tmp_path / "a", 1))
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"new" * 50)
    for number in (1, 2):
        assert engine.answer(PROMPT, lora_request=adapter_in(tmp_path / "a", number)).cached == 0
        engine.flush()
    engine.check_empty()


def test_a_tenants_blocks_are_found_by_its_salt(open_engine: Open, tmp_path: Path, capsys):
    """Whatever else stands in the namespace of vLLM's requests."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"a" * 50)
    adapter = SimpleNamespace(lora_int_id=1, lora_path=str(tmp_path), load_inplace=False)
    url = f"disk:{tmp_path}/kv?capacity=16MiB"
    engine = open_engine(url=url)
    for more in ({"cache_salt": "one", "lora_request": adapter}, {"cache_salt": "one"}, {}):
        assert engine.answer(PROMPT, **more).cached == 0
        engine.flush()
    assert main(["prune", url, "--salt", "one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deleted"] == 2 * 5
    assert main(["prune", url, "--salt", "one"]) == 3
    assert engine.answer(PROMPT).cached == 5 * T


def test_a_producer_tells_how_far_and_a_consumer_waits_for_it(open_engine: Open, shared):
    consumer = open_engine(Roles(saves=False, producer_timeout_s=60.0), min_priority=1, url=shared)
    told_of = {NUM_TOKENS: 5 * T}
    waiting = consumer.submit(PROMPT, wanted=len(PROMPT) + 1, kv_transfer_params=told_of)
    until = time.monotonic() + 0.05
    consumer.run(lambda: time.monotonic() > until)
    assert waiting.state == "waiting"
    producer = open_engine(Roles(loads=False, tells=True), url=shared)
    assert producer.answer(PROMPT).params == told_of
    consumer.run()
    assert (waiting.cached, waiting.answer) == (5 * T, told(consumer))


def test_a_consumer_waits_no_longer_than_it_was_told_to(open_engine: Open):
    consumer = open_engine(Roles(saves=False, producer_timeout_s=0.1), min_priority=1)
    started = time.monotonic()
    answer = consumer.answer(PROMPT, kv_transfer_params={NUM_TOKENS: 5 * T})
    assert 0.1 <= time.monotonic() - started < 30
    assert (answer.cached, answer.answer) == (0, told(consumer))


def test_a_consumer_saves_nothing_and_a_producer_loads_nothing(open_engine: Open, shared):
    consumer = open_engine(Roles(saves=False), min_priority=1, url=shared)
    consumer.answer(PROMPT, 2 * T)
    consumer.flush()
    both = open_engine(url=shared)
    assert both.answer(PROMPT).cached == 0
    both.flush()
    producer = open_engine(Roles(loads=False), url=shared)
    assert producer.answer(PROMPT).cached == 0
    assert consumer.answer(PROMPT).cached == 5 * T


def test_a_producer_saves_a_prompt_in_the_step_that_computes_it(open_engine: Open, shared):
    """An engine in its client's process makes no further step when the last request has ended."""
    producer = open_engine(Roles(loads=False), url=shared)
    request = producer.submit(PROMPT, wanted=len(PROMPT) + 1)
    producer.run(lambda: request.state == "finished")
    producer.flush()
    assert open_engine(url=shared).answer(PROMPT).cached == 5 * T
    producer.run()


# ------------------------------------------------------------------ what vLLM describes


def test_groups_become_layouts_with_the_layers_in_order():
    groups = cache_groups(
        groups_of(
            (["model.layers.10.attn", "model.layers.2.attn"], attention()),
            (["model.layers.1.attn"], attention("SlidingWindowSpec", sliding_window=64)),
        )
    )
    assert [one.layout.layers for one in groups] == [(2, 10), (1,)]
    assert [one.layout.window for one in groups] == [None, 64]
    assert groups[0].layer_names == ("model.layers.2.attn", "model.layers.10.attn")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (attention("ChunkedLocalAttentionSpec"), "ChunkedLocal"),
        (attention(kv_quant_mode=1), "quantised"),
        (attention(state_content_bytes=100), "packed"),
        (attention(num_head_slots=1), "packed"),
        pytest.param(
            attention(non_causal=True),
            "causal",
            marks=pytest.mark.planted("bidirectional", "vllm", "refused"),
        ),
        pytest.param(
            attention("EncoderOnlyAttentionSpec"),
            "EncoderOnlyAttentionSpec",
            marks=pytest.mark.planted("encoder-as-decoder", "vllm", "refused"),
        ),
        (attention(block_size=1), "tokens_per_block: 1 must be at least 2"),
        (attention(block_size=32), "must have the same"),
    ],
)
def test_what_is_not_served_is_refused_with_a_sentence(wrong, says):
    groups = groups_of((["model.layers.0.attn"], wrong), (["model.layers.1.attn"], attention()))
    with pytest.raises(ConfigurationError, match=says):
        cache_groups(groups)


@pytest.mark.parametrize(
    ("rank_heads", "size", "model_heads", "total"),
    [(2, 2, 4, 4), (1, 8, 4, 4), (4, 1, 4, 4), (3, 2, 5, 6)],
)
def test_heads_of_the_whole_model(rank_heads, size, model_heads, total):
    groups = cache_groups(groups_of((["layers.0"], attention(num_kv_heads=rank_heads))))
    assert total_heads(groups, Shard(0, size), model_heads) == (total,)


def latents(device: str, *, enable_prefix_caching: bool) -> dict[str, SimpleNamespace]:
    return {
        "model_config": SimpleNamespace(use_mla=True),
        "device_config": SimpleNamespace(device_type=device),
        "cache_config": SimpleNamespace(enable_prefix_caching=enable_prefix_caching),
    }


def poolers(runner: str, *, is_prefix_caching_supported: bool) -> dict[str, SimpleNamespace]:
    supported = is_prefix_caching_supported
    found = SimpleNamespace(runner_type=runner, is_prefix_caching_supported=supported)
    return {"model_config": found}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"parallel_config": SimpleNamespace(decode_context_parallel_size=2)},
            "decode_context_parallel_size=2: the order",
        ),
        ({"speculative_config": SimpleNamespace(method="dspark")}, "method='dspark'"),
        ({"load_config": SimpleNamespace(load_format="dummy")}, "load_format='dummy'"),
        ({"model_config": SimpleNamespace(hf_overrides=lambda one: one)}, "hf_overrides"),
        (poolers("pooling", is_prefix_caching_supported=False), "hidden states of all tokens"),
        (latents("cpu", enable_prefix_caching=False), "keeps latents"),
    ],
)
def test_settings_that_would_give_wrong_hits_are_refused(more, says):
    refuse_unserved(engine_config())
    refuse_unserved(engine_config(speculative_config=SimpleNamespace(method="ngram")))
    refuse_unserved(engine_config(**latents("cuda", enable_prefix_caching=False)))
    refuse_unserved(engine_config(**latents("cpu", enable_prefix_caching=True)))
    refuse_unserved(engine_config(**poolers("pooling", is_prefix_caching_supported=True)))
    refuse_unserved(engine_config(**poolers("generate", is_prefix_caching_supported=False)))
    with pytest.raises(ConfigurationError, match=says):
        refuse_unserved(engine_config(**more))


def test_code_of_a_plug_in_is_in_the_namespace(monkeypatch):
    def variant(**entry: object) -> dict[str, str]:
        registry = SimpleNamespace(models={"LlamaForCausalLM": SimpleNamespace(**entry)})
        module = SimpleNamespace(ModelRegistry=registry)
        monkeypatch.setitem(sys.modules, "vllm.model_executor.models.registry", module)
        return variant_of(model_config(architecture="LlamaForCausalLM"))

    own = "vllm.model_executor.models.llama"
    assert variant(module_name=own, class_name="LlamaForCausalLM") == {}
    assert variant(module_name="plugged.llama", class_name="Llama") == {
        "code": "plugged.llama.Llama"
    }
    assert variant(model_cls=torch.nn.Linear) == {"code": "torch.nn.modules.linear.Linear"}


@pytest.mark.parametrize("several", [{"world_size": 2}, {"distributed_executor_backend": "mp"}])
def test_memory_of_one_process_is_refused_by_several(several):
    one = {"world_size": 1, "distributed_executor_backend": "uni"}
    refuse_apart("memory:", SimpleNamespace(**one))
    refuse_apart("disk:/x", SimpleNamespace(**(one | several)))
    with pytest.raises(ConfigurationError, match="'memory:': lives in one process"):
        refuse_apart("memory:", SimpleNamespace(**(one | several)))


def model_config(**settings: object) -> SimpleNamespace:
    return engine_config(model_config=SimpleNamespace(**settings))


def read_elsewhere(theta: float) -> SimpleNamespace:
    found = SimpleNamespace(to_dict=lambda: {"rope_theta": theta})
    return model_config(hf_config_path="/elsewhere", hf_config=found)


def adapters(**settings: object) -> SimpleNamespace:
    return engine_config(lora_config=SimpleNamespace(**settings))


def pictures(**settings: object) -> SimpleNamespace:
    return model_config(multimodal_config=SimpleNamespace(**settings))


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        *(
            (name, model_config(**{name: one}), model_config(**{name: other}))
            for name, one, other in (
                ("hf_overrides", {"rope_theta": 5.0}, {"rope_theta": 6.0}),
                ("quantization", "fp8", "int8"),
                ("quantization_config", {"ignore": ["a"]}, {"ignore": ["b"]}),
                ("model_class_overrides", {"Llama": "a.B"}, {"Llama": "a.C"}),
                ("code_revision", "one", "other"),
            )
        ),
        ("hf_config_path", read_elsewhere(5.0), read_elsewhere(6.0)),
        (
            "adapters",
            adapters(target_modules=["q_proj"]),
            adapters(target_modules=["q_proj", "o_proj"]),
        ),
        (
            "adapters",
            adapters(enable_tower_connector_lora=True),
            adapters(lora_dtype=torch.bfloat16),
        ),
        ("video_pruning_rate", pictures(video_pruning_rate=0.5), pictures(video_pruning_rate=0.7)),
        (
            "mm_processor_kwargs",
            pictures(mm_processor_kwargs={"do_normalize": False}),
            pictures(mm_processor_kwargs={"do_normalize": True}),
        ),
    ],
)
def test_settings_that_change_kv_are_in_the_namespace(name, one, other):
    assert list(variant_of(one)) == list(variant_of(other)) == [name]
    assert variant_of(one) == variant_of(one) != variant_of(other)


@pytest.mark.parametrize(
    "plain",
    [
        engine_config(),
        pictures(mm_processor_kwargs={}),
        pictures(mm_processor_kwargs=None),
        adapters(target_modules=None, enable_tower_connector_lora=False, lora_dtype=torch.float32),
    ],
)
def test_settings_that_change_nothing_are_not(plain):
    assert variant_of(plain) == {}
    assert variant_of(plain, packing="opaque") == {"packing": "opaque"}


@pytest.mark.planted("cache-dtype", "vllm", "refused")
def test_a_cache_of_another_dtype_than_the_models_is_apart_and_on_a_cpu_refused():
    [group] = cache_groups(groups_of((["layers.0"], attention(dtype=torch.bfloat16))))

    def computes_in(dtype: torch.dtype, device: str = "cuda") -> SimpleNamespace:
        return engine_config(
            model_config=SimpleNamespace(dtype=dtype),
            device_config=SimpleNamespace(device_type=device),
        )

    assert variant_of(computes_in(torch.bfloat16), [group.layout]) == {}
    apart = [variant_of(computes_in(one), [group.layout]) for one in (torch.float16, torch.float32)]
    assert apart == [{"dtype": "float16"}, {"dtype": "float32"}]
    refuse_other_dtype_on_cpu(computes_in(torch.float16), [group.layout])
    refuse_other_dtype_on_cpu(computes_in(torch.bfloat16, "cpu"), [group.layout])
    with pytest.raises(ConfigurationError, match=r"kv_cache_dtype: bfloat16 .* in float16.*'auto'"):
        refuse_other_dtype_on_cpu(computes_in(torch.float16, "cpu"), [group.layout])


def test_weights_from_other_files_are_in_the_namespace():
    def loaded(load_format: str) -> SimpleNamespace:
        return engine_config(load_config=SimpleNamespace(load_format=load_format))

    assert variant_of(loaded("safetensors")) == {}
    assert variant_of(loaded("pt")) == {"load_format": "pt"}
    refuse_unserved(loaded("pt"))
    with pytest.raises(ConfigurationError, match=r"load_format='tensorizer'.*model_revision"):
        refuse_unserved(loaded("tensorizer"))
    refuse_unserved(loaded("tensorizer"), is_named=True)


@pytest.mark.planted("long-factors", "vllm", "key")
@pytest.mark.parametrize("in_rope", [True, False])
@pytest.mark.parametrize("by_layer", [True, False])
def test_long_factors_of_a_rope_are_in_the_namespace(in_rope, by_layer):
    """As vLLM takes them for all tokens as soon as a sequence may be longer than the original."""

    def longest(length: int, kind: str = "longrope") -> dict[str, str]:
        original = {"original_max_position_embeddings": 4096}
        rope = {"rope_type": kind} | (original if in_rope else {})
        text = {"rope_parameters": {"full_attention": rope} if by_layer else rope}
        model = SimpleNamespace(
            hf_text_config=SimpleNamespace(**text | ({} if in_rope else original)),
            max_model_len=length,
        )
        return variant_of(engine_config(model_config=model))

    assert longest(4096) == {}
    assert longest(4097) == longest(131072) == {"max_model_len": "long factors"}
    assert longest(131072, "llama3") == {}


# ------------------------------------------------------------------ memory


def group(num_kv_heads: int = 2, block_size: int = 16):
    return cache_groups(
        groups_of((["layers.0"], attention(num_kv_heads=num_kv_heads, block_size=block_size)))
    )


def test_keys_and_values_are_found_in_every_form():
    keys, values = torch.randn(2, 3, 16, 2, 8)  # [num_blocks, tokens, heads, dim] of each
    packed = torch.cat([keys, values], 3).transpose(1, 2).contiguous()
    smaller = torch.cat([keys, values], 3).reshape(6, 8, 2, 16).transpose(1, 2)
    pair = torch.stack([keys, values])
    transposed = torch.stack(
        [keys.permute(0, 2, 3, 1).reshape(3, 2, 128), values.transpose(1, 2).reshape(3, 2, 128)], 2
    ).view(3, 2, 16, 16)
    for cache, packing in (
        (packed, None),
        (smaller, None),
        (pair, None),
        (transposed, "transposed"),
    ):
        [planes] = group_planes(group(), {"layers.0": cache}, 3, packing=packing)
        assert torch.equal(planes.views[0], keys)
        assert torch.equal(planes.views[1], values)
        assert planes.views[0].untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


@pytest.mark.planted("other-interface", "vllm", "refused")
@pytest.mark.parametrize(
    ("cache", "packing", "says"),
    [
        (torch.zeros(3, 2, 16, 20), None, "shape"),
        (torch.zeros(3, 4, 16, 16), None, "cannot be served"),
        (torch.zeros(6, 2, 8, 16), None, "block size to 8"),
        (torch.zeros(3, 2, 32, 16)[:, :, ::2], "transposed", "strides"),
        (torch.zeros(3, 2, 16, 16, dtype=torch.float16), None, "float16"),
    ],
)
def test_memory_of_another_shape_is_refused(cache, packing, says):
    with pytest.raises(ConfigurationError, match=says):
        group_planes(group(), {"layers.0": cache}, 3, packing=packing)
    with pytest.raises(ConfigurationError, match=r"layers\.0"):
        group_planes(group(), {}, 3)


# ------------------------------------------------------------------ reports, counters


def test_reports_of_ranks_are_joined():
    one = WorkerReport((WorkerMeta({1: 2}),), {5: 8, 6: 4})
    other = WorkerReport((WorkerMeta({1: 1}),), {5: 4})
    joined = one.aggregate(other)
    assert joined.failed == {5: 4, 6: 4}
    assert len(joined.ranks) == 2


def test_every_load_is_counted_once(open_engine: Open):
    engine = open_engine()
    steps = CounterSteps()
    engine.answer(PROMPT)
    engine.flush()
    steps.take()
    engine.answer(PROMPT)
    assert steps.take()["loaded_blocks"] == 5
    count("connector.lookup.late")
    moved = steps.take()
    assert moved["late_lookups"] == 1
    assert "loaded_blocks" not in moved


def test_an_adapter_that_is_still_read_is_asked_for_again(open_engine: Open, monkeypatch):
    engine = open_engine()
    pending: Future[str] = Future()
    monkeypatch.setattr(engine.scheduler._request_names._adapters, "find", lambda *_: pending)
    lora = SimpleNamespace(lora_int_id=1, lora_path="here", load_inplace=False)
    request = engine.submit(PROMPT, wanted=len(PROMPT) + 1, lora_request=lora)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    pending.set_result("d" * 64)
    engine.run()
    assert request.answer == told(engine)
    engine.check_empty()
