"""Several pools in the connector's interface: who is told what, and what a failed load costs."""

from __future__ import annotations

import pytest
import recording
from bench_engine import T
from recording import Script, fail
from stores import DictStore
from window_engine import (
    ALL_LAYOUTS,
    FULL_AND_WINDOW,
    TWO_SHAPES,
    WINDOW_ONLY,
    GroupKv,
    WindowEngine,
    llm_args,
    reference,
)

from kvconnect.connector.data import RequestData, SchedulerOutput
from kvconnect.connector.io.lookup import blocks_needed
from kvconnect.errors import ConfigurationError, ConnectorContractError
from kvconnect.request import LlmRequest

PROMPT = list(range(1, 6 * T + 3))
GENERATE = 4


def engine(layouts=FULL_AND_WINDOW, *, chunk: int = 1000, **settings) -> WindowEngine:
    config = recording.config("PoolsWorker", **settings)
    return WindowEngine(llm_args(config, layouts), chunk=chunk)


def reports(script: Script) -> list[RequestData]:
    return [data for out in script.outputs for data in (*out.new_requests, *out.cached_requests)]


# ---------------------------------------------------------------------- start-up


@pytest.mark.parametrize(
    ("layouts", "pools"),
    [(FULL_AND_WINDOW, r"2 KV pools \(full attention, window 10\)"),
     (WINDOW_ONLY, r"1 KV pools \(window 10\)"), (TWO_SHAPES, "2 KV pools")],
)  # fmt: skip
def test_a_connector_of_flat_forms_only_is_refused_by_name(
    script: Script, layouts: tuple, pools: str
) -> None:
    args = llm_args(recording.config(), layouts)
    with pytest.raises(ConfigurationError, match=f"RecordingWorker: the model has {pools}"):
        WindowEngine(args)
    assert {"worker.shutdown", "scheduler.shutdown"} <= set(script.names())


@pytest.mark.parametrize("layouts", ALL_LAYOUTS)
def test_a_worker_gets_every_pool_once_in_the_order_of_the_groups(
    script: Script, layouts: tuple
) -> None:
    with engine(layouts) as bench:
        [(pools,)] = script.named("register_kv_cache_layout")
        assert [pool.layout for pool in pools] == list(layouts)
        for pool, tensor in zip(pools, bench.kv.pools, strict=True):
            assert pool.tensor is tensor
    assert script.named("register_kv_caches") == []


def test_pools_that_are_not_as_the_layouts_say_are_refused(script: Script) -> None:
    args = llm_args(recording.config("PoolsWorker"), FULL_AND_WINDOW)
    kv = GroupKv(FULL_AND_WINDOW[::-1])
    with pytest.raises(ConfigurationError, match="pool group 0: GroupKv has"):
        WindowEngine(args, kv=kv)


# ---------------------------------------------------------------------- reports


@pytest.mark.parametrize("layouts", ALL_LAYOUTS)
@pytest.mark.parametrize("chunk", [3, 2 * T, 1000])
def test_every_place_of_every_group_is_reported_once(
    script: Script, layouts: tuple, chunk: int
) -> None:
    """A window's places as they are reserved, so behind those of full attention."""
    with engine(layouts, chunk=chunk) as bench:
        held: list[dict[int, int]] = [{} for _ in layouts]
        request = bench.submit(PROMPT, GENERATE)

        def meta(output: SchedulerOutput) -> None:
            [data] = output.new_requests + output.cached_requests
            assert data.new_block_ids_by_group[0] == data.new_block_ids
            assert len(data.priorities) == len(data.new_block_ids)
            end = data.computed_position + data.num_scheduled_tokens
            for group, ids in enumerate(data.new_block_ids_by_group):
                known = held[group]
                known.update(enumerate(ids, len(known)))
                needed = blocks_needed(layouts[group].window, data.computed_position, T)
                # All that the step reads and writes was told by now, and is where it was told.
                for number in range(needed.start, -(-end // T)):
                    assert known[number] == bench.kv.held[request.request_id][group][number] >= 0

        script.meta = meta
        bench.run()
        for known in held:
            assert sorted(known) == list(range(-(-(len(PROMPT) + GENERATE - 1) // T)))
    first = reports(script)[0]
    for group, one in enumerate(layouts):
        told = len(first.new_block_ids_by_group[group])
        assert told == (7 if one.window is None else min(7, -(-chunk // T)))


def test_places_outside_a_window_are_reported_as_such(script: Script) -> None:
    script.match = lambda *_: (6 * T, True)
    with engine() as bench:
        bench.submit(PROMPT)
        bench.step()
    [loading] = script.outputs[0].loading_requests
    full, window = loading.new_block_ids_by_group
    assert min(full) >= 0
    outside = blocks_needed(10, 6 * T, T).start
    assert window[:outside] == [-1] * outside
    assert min(window[outside:]) >= 0


@pytest.mark.parametrize("layouts", ALL_LAYOUTS)
def test_rejected_drafts_take_the_places_they_had(script: Script, layouts: tuple) -> None:
    with engine(layouts) as bench:
        request = bench.submit(PROMPT[: 2 * T], 3)
        bench.step()
        record = bench.manager._records[request.request_id]
        before = list(record.num_blocks)
        assert before == [2] * len(layouts)
        bench.step()  # the generated token begins a block
        assert record.num_blocks == [3] * len(layouts)
        for group, ids in enumerate(bench.kv.held[request.request_id]):
            bench.kv._drop(group, ids[2:])
            del ids[2:]
        request.rewind(2 * T)
        bench.manager.on_rewind(request)
        assert record.num_blocks == before


# ---------------------------------------------------------------------- failed loads


@pytest.mark.parametrize("layouts", ALL_LAYOUTS)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("ended", [False, True])
def test_a_failed_load_sends_its_request_back_to_the_queue(
    script: Script, layouts: tuple, is_async: bool, ended: bool
) -> None:
    """Truncated, it would lack the blocks that its windows need there."""
    script.match = lambda _, position: (5 * T - position, is_async)
    script.finished = lambda *_: ([], [])
    with engine(layouts, max_quarantined_fraction=1.0) as bench:
        request = bench.submit(PROMPT, GENERATE)
        script.failures = [fail(request, 3 * T, ended=ended)]
        bench.step()
        assert bench.outcomes[-1].failed == {request.request_id: 0}
        assert bench.outcomes[-1].requeue == {request.request_id}
        assert script.named("load_failed") == [(request.request_id, 0)]
        assert script.named("request_reset") == [(request.request_id,)]
        quarantine = bench.manager._ledger.quarantine
        assert bool(quarantine) is not ended
        assert bench.kv.all_free() is ended  # what may still be written to is nobody else's
        if not ended:
            script.finished = lambda *_: ([], [request.request_id])
            bench.manager.end_step()
            script.finished = lambda *_: ([], [])
            assert bench.kv.all_free()
        script.match = lambda *_: (0, False)
        bench.run()
        answer = request.tokens.view[len(PROMPT) :].tolist()
        assert answer == reference(PROMPT, layouts, GENERATE)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failed_load_calls_no_more_valid_than_the_device_really_matched(
    script: Script, is_async: bool
) -> None:
    script.match = lambda _, position: (5 * T - position, is_async)
    with engine() as bench:
        bench.kv.device_match = lambda _: 4 * T
        bench.kv.max_matched = lambda _position: 2 * T + 1
        request = bench.submit(PROMPT, GENERATE)
        script.failures = [fail(request, 5 * T)]
        bench.step()
        assert bench.outcomes[-1].failed == {request.request_id: 2 * T}


def test_from_a_store_that_always_fails_is_loaded_twice(script: Script) -> None:
    script.match = lambda _, position: (5 * T - position, True)
    script.finished = lambda *_: ([], [])
    with engine() as bench:
        request = bench.submit(PROMPT, GENERATE)
        while bench.queue or bench.running or bench.loading:
            script.failures = [fail(request, 0)] if bench.queue else []
            bench.step()
        assert sum(len(output.loading_requests) for output in script.outputs) == 2
        asked = script.named("get_num_new_matched_tokens")
        assert len(asked) == len(script.named("update_state_after_alloc")) == 3
        answer = request.tokens.view[len(PROMPT) :].tolist()
        assert answer == reference(PROMPT, FULL_AND_WINDOW, GENERATE)
        assert bench.kv.all_free()


def test_a_load_without_blocks_to_fill_is_an_error_not_a_wrong_token() -> None:
    store = DictStore()
    with WindowEngine(llm_args(store, FULL_AND_WINDOW)) as bench:
        bench.answer(PROMPT)

    class Forgetful(GroupKv):
        def trimmed(self, request: LlmRequest, group: int) -> list[int]:
            ids = super().trimmed(request, group)
            return [-1] * len(ids) if group else ids

    kv = Forgetful(FULL_AND_WINDOW)
    with WindowEngine(llm_args(store, FULL_AND_WINDOW), kv=kv) as bench:
        bench.submit(PROMPT)
        with pytest.raises(ConnectorContractError, match="no block in pool group 1"):
            bench.step()
