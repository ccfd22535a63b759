"""What connectors written for TensorRT-LLM read, with its names and its meaning."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import recording
import torch
from bench_engine import BenchEngine, llm_args
from recording import Script

from kvconnect import LLM, KvCacheConfig, SamplingParams
from kvconnect.keys import BlockKey, KeyChain, Shard
from kvconnect.request import LlmRequest

T = 8
PROMPT = list(range(1, 3 * T + 1))


@pytest.fixture(scope="module")
def model(model_of: Callable[[str], Path]) -> Path:
    return model_of("llama")


@pytest.fixture
def llm(model: Path, script: Script) -> Iterator[LLM]:
    cache = KvCacheConfig(tokens_per_block=T, max_tokens=32 * T)
    with LLM(model, kv_cache=cache, connector=recording.config()) as llm:
        yield llm


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def seen_after_alloc(script: Script, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Matched tokens, position and generated tokens, at each `update_state_after_alloc`."""
    seen: list[tuple[int, int, int]] = []

    def note(_: recording.Recorder, request: LlmRequest, block_ids: list[int]) -> None:
        seen.append(
            (
                request.num_connector_matched_tokens,
                request.context_current_position,
                request.num_generated_tokens,
            )
        )

    monkeypatch.setattr(recording.Recorder, "update_state_after_alloc", note)
    return seen


@pytest.mark.parametrize("is_async", [False, True])
def test_what_the_connector_brings_is_known_after_allocation(
    llm: LLM, script: Script, monkeypatch, is_async
):
    seen = seen_after_alloc(script, monkeypatch)
    script.match = lambda *_: (2 * T, is_async)
    llm.generate([PROMPT], params(2))
    assert seen == [(2 * T, 2 * T, 0)]


def test_what_the_device_has_counts_in_the_position_only(llm: LLM, script: Script, monkeypatch):
    llm.generate([PROMPT[:T]], params(1))
    seen = seen_after_alloc(script, monkeypatch)
    script.match = lambda _, position: (2 * T - position, False)
    llm.generate([PROMPT], params(1))
    assert seen == [(T, 2 * T, 0)]


def test_an_answer_that_is_cut_is_seen_as_it_is_taken(llm: LLM, script: Script, monkeypatch):
    seen = seen_after_alloc(script, monkeypatch)
    script.match = lambda *_: (1000, False)
    llm.generate([PROMPT], params(1))
    assert seen == [(len(PROMPT) - 1, len(PROMPT) - 1, 0)]


def test_a_request_matched_once_and_then_not_forgets_it(script: Script):
    seen = []
    script.match = lambda *_: (4, False)
    with BenchEngine(llm_args(recording.config())) as bench:
        request = bench.submit([1, 2, 3, 4, 5], max_tokens=4)
        bench.step()
        seen.append(request.num_connector_matched_tokens)
        script.match = lambda *_: (0, False)
        bench.preempt(request)
        bench.step()
        seen.append(request.num_connector_matched_tokens)
    assert seen == [4, 0]


def test_a_request_is_finished_when_the_connector_hears_of_its_end(llm: LLM, script: Script):
    seen = []
    before = []

    def keep(request: LlmRequest) -> bool:
        seen.append((request.is_finished, request.is_finished_normal))
        return False

    def match(request: LlmRequest, _: int) -> tuple[int, bool]:
        before.append((request.is_finished, request.is_finished_normal))
        return 0, False

    script.keep, script.match = keep, match
    llm.generate([PROMPT], params(2))
    handle = llm.submit(PROMPT, params(200))
    next(handle.stream())
    handle.abort()
    handle.result()
    assert before == [(False, False)] * 2
    assert seen == [(True, True), (True, False)]


def test_no_request_has_inputs_that_are_no_text(llm: LLM, script: Script):
    seen = []
    script.keep = lambda request: bool(seen.append(request.multimodal_positions))
    llm.generate([PROMPT], params(1))
    assert not any(seen)


def test_block_hashes_are_the_keys_and_numbers_of_64_bits(llm: LLM, script: Script):
    llm.generate([PROMPT], params(1))
    [data] = script.outputs[0].new_requests
    assert len(data.block_hashes) == 3
    assert data.block_hashes == data.block_keys
    numbers = [operator.index(one) for one in data.block_hashes]
    assert numbers == [int(one) for one in data.block_hashes]
    assert len(set(numbers)) == 3
    assert all(0 <= one < 2**64 for one in numbers)


def test_block_keys_are_listed_in_the_steps_only_in_which_they_are_read(
    llm: LLM, script: Script, monkeypatch
):
    """A step of 16 requests of 131k tokens else takes over a millisecond for them."""
    listed = []

    def keys(chain: KeyChain, start: int = 0, stop: int | None = None) -> list[BlockKey]:
        listed.append((start, stop))
        return list_keys(chain, start, stop)

    list_keys = KeyChain.keys
    monkeypatch.setattr(KeyChain, "keys", keys)
    monkeypatch.setattr(recording, "copy", SimpleNamespace(deepcopy=lambda output: output))
    llm.generate([PROMPT], params(8))
    whole = [one for one in listed if one[0] == 0]
    assert len(whole) < 4, listed  # not one for each of eight steps
    data = script.outputs[1].cached_requests[0]
    assert pickle.loads(pickle.dumps(data)).block_keys == list(data.block_keys)
    assert data.block_keys == script.outputs[0].new_requests[0].block_keys
    assert len(data.block_keys) == 3


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2, 2, 3)])
def test_how_the_model_is_spread_is_told_in_both_ways(shard):
    args = llm_args("memory:", shard=shard)
    assert args.tensor_parallel_size == shard.tp_size
    assert args.pipeline_parallel_size == shard.pp_size
    mapping = args.parallel_config.to_mapping()
    assert mapping == args.mapping
    assert mapping.world_size == shard.tp_size * shard.pp_size
    assert mapping.rank == shard.pp_rank * shard.tp_size + shard.tp_rank
    assert (mapping.tp_size, mapping.tp_rank) == (shard.tp_size, shard.tp_rank)
    assert (mapping.pp_size, mapping.pp_rank) == (shard.pp_size, shard.pp_rank)
    assert (args.world_size, args.rank) == (mapping.world_size, mapping.rank)


def test_a_rank_knows_its_neighbours():
    middle = llm_args("memory:", shard=Shard(1, 2, 1, 3)).mapping
    assert (middle.rank, middle.local_rank, middle.world_size) == (3, 3, 6)
    assert (middle.tp_group, middle.pp_group) == ([2, 3], [1, 3, 5])
    assert (middle.prev_pp_rank(), middle.next_pp_rank()) == (1, 5)
    assert (middle.is_first_pp_rank(), middle.is_last_pp_rank()) == (False, False)
    assert (middle.has_tp(), middle.has_pp()) == (True, True)
    first = llm_args("memory:", shard=Shard(0, 2, 0, 3)).mapping
    assert (first.is_first_pp_rank(), first.prev_pp_rank()) == (True, 4)
    last = llm_args("memory:", shard=Shard(0, 2, 2, 3)).mapping
    assert (last.is_last_pp_rank(), last.next_pp_rank()) == (True, 0)
    alone = llm_args("memory:").mapping
    assert (alone.has_tp(), alone.has_pp(), alone.is_multi_node()) == (False, False, False)
    assert (alone.is_first_pp_rank(), alone.is_last_pp_rank()) == (True, True)


def test_ranks_have_numbers_of_their_own():
    shards = [Shard(tp, 2, pp, 3) for pp in range(3) for tp in range(2)]
    ranks = [llm_args("memory:", shard=one).mapping.rank for one in shards]
    assert ranks == list(range(6))


def test_the_stream_on_the_cpu_has_the_methods_of_one(llm: LLM, script: Script, monkeypatch):
    streams: dict[str, object] = {}

    def note(name: str):
        def method(_: recording.RecordingWorker, *args: object) -> None:
            streams[name] = args[-1]

        return method

    names = ("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save")
    for name in names:
        monkeypatch.setattr(recording.RecordingWorker, name, note(name))
    llm.generate([PROMPT], params(1))
    assert set(streams) == set(names)
    for stream in streams.values():
        stream.synchronize()
        assert stream.query() is True
        event = stream.record_event()
        assert event.query() is True
        event.synchronize()
        event.record(stream)
        event.wait(stream)
        stream.wait_event(event)
        stream.wait_stream(stream)
        assert stream.record_event(event) is event
        assert stream.device == torch.device("cpu")


def test_the_stream_of_the_cpu_waits_for_one_of_a_device():
    """What comes next on the CPU runs at once, so the wait cannot be put off."""
    from kvconnect.connector.stream import CpuStream

    waited = []

    class OfADevice:
        def synchronize(self) -> None:
            waited.append(self)

    stream, event = OfADevice(), OfADevice()
    CpuStream().wait_stream(stream)
    CpuStream().wait_event(event)
    assert waited == [stream, event]
