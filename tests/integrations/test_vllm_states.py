"""Recurrent states, quantised caches and draft layers as vLLM describes them to `KvConnect`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_configs import attention as attention_of
from vllm_configs import engine_config, groups_of

from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.connector.data import LlmArgs, RequestData, SchedulerOutput
from kvconnect.connector.pair.messages import WorkerMeta
from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.core.offload import EngineScheduler
from kvconnect.integrations.vllm.caches import group_planes
from kvconnect.integrations.vllm.drafts import draft_variant, refuse_drafts
from kvconnect.integrations.vllm.identity import refuse_states, refuse_unserved, variant_of
from kvconnect.integrations.vllm.layouts import cache_groups, group_order, total_heads
from kvconnect.integrations.vllm.requests import Tracked
from kvconnect.integrations.vllm.steps import GroupOrder, StepReader
from kvconnect.keys import BlockKey, Shard
from kvconnect.layout import KvCacheLayout, StateTensor
from kvconnect.request import LlmRequest
from kvconnect.shards import StoredHeads, stored_heads
from kvconnect.tokens import as_token_array

T = 24
"""Tokens of a block: no power of two, as vLLM's in hybrid models."""
PAGE = 2 * T * 2 * 8 * 4
CONTENT = 3 * 5 * 2 + 2 * 7 * 4


class Mode(IntEnum):
    """As vLLM's ``KVQuantMode``."""

    NONE = 0
    FP8_PER_TENSOR = 1
    FP8_PER_TOKEN_HEAD = 3
    TURBOQUANT_4BIT_NC = 7


attention = partial(attention_of, block_size=T)


def recurrent(**more: Any) -> Any:
    values = {
        "block_size": T,
        "shapes": ((3, 5), (2, 7)),
        "dtypes": (torch.bfloat16, torch.float32),
        "mamba_type": SimpleNamespace(name="GDN_ATTN"),
        "mamba_cache_mode": "align",
        "state_content_size_bytes": CONTENT,
        "page_size_bytes": PAGE,
    }
    return type("MambaSpec", (), values | more)()


HYBRID = groups_of(
    (["model.layers.0.linear_attn", "model.layers.2.linear_attn"], recurrent()),
    (["model.layers.1.linear_attn"], recurrent()),
    (["model.layers.3.attn"], attention()),
)

# ------------------------------------------------------------------ groups and their memory


def test_groups_of_states_come_last_and_say_what_they_hold():
    groups = cache_groups(HYBRID)
    assert [one.layout.kind for one in groups] == ["kv", "state", "state"]
    assert [one.layout.layers for one in groups] == [(3,), (0, 2), (1,)]
    order = group_order(groups, has_drafts=False)
    assert (order.numbers, order.states, order.num_attention) == ((2, 0, 1), (0, 1), 1)
    assert order.ordered([["a"], ["b"], ["c"]]) == [["c"], ["a"], ["b"]]
    for other in (
        recurrent(shapes=((3, 5), (7, 2))),
        recurrent(dtypes=(torch.float16, torch.float32)),
        recurrent(mamba_type=SimpleNamespace(name="MAMBA2")),
    ):
        [changed] = cache_groups(groups_of((["model.layers.1.linear_attn"], other)))
        assert changed.layout.fingerprint() != groups[2].layout.fingerprint()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"mamba_cache_mode": "none"}, "enable_prefix_caching"),
        ({"page_size_bytes": CONTENT}, "do not lie in pages of"),
    ],
)
def test_states_that_cannot_be_stored_are_refused(more, says):
    with pytest.raises(ConfigurationError, match=says):
        cache_groups(groups_of((["model.layers.0.linear_attn"], recurrent(**more))))


def test_a_stage_without_a_layer_of_a_group_is_refused():
    with pytest.raises(ConfigurationError, match="stage of the pipeline"):
        cache_groups(groups_of(([], recurrent()), (["model.layers.3.attn"], attention())))


def test_each_rank_stores_its_part_of_the_states():
    groups = cache_groups(HYBRID)
    layouts = [group.layout for group in groups]
    for size in (1, 2):
        heads = total_heads(groups, Shard(0, size), 2 * size)
        assert heads == (2 * size, size, size)
        ranks = [stored_heads(layouts, Shard(rank, size), heads) for rank in range(size)]
        assert {one[1].own for one in ranks} == {Shard(rank, size) for rank in range(size)}
        assert all(one[1].is_first and one[1].sizes == (size,) for one in ranks)
    with pytest.raises(ConfigurationError, match="one part for each rank"):
        StoredHeads(layouts[1], Shard(0, 4), 2)
    with pytest.raises(ConfigurationError, match="whether recurrent states are whole"):
        stored_heads(layouts, Shard(0, 2))


def test_states_are_read_and_written_where_the_engine_has_them():
    """All groups have the same memory: a block is a page of one group or of another."""
    memory = torch.arange(4 * PAGE, dtype=torch.int32).to(torch.int8)
    states = memory.as_strided((4, 1, 1, CONTENT), (PAGE, CONTENT, CONTENT, 1))
    keys = memory.view(torch.float32).as_strided((4, 2, T, 16), (PAGE // 4, T * 16, 16, 1))
    names = [name for one in HYBRID.kv_cache_groups for name in one.layer_names]
    caches = {name: keys if name.endswith(".attn") else states for name in names}
    groups = cache_groups(HYBRID)
    planes = group_planes(groups, caches, 4)
    for group, plane in zip(groups[1:], planes[1:], strict=True):
        assert len(plane.views) == group.layout.num_layers
        for view in plane.views:
            rows = view[2].flatten()[:CONTENT]
            assert torch.equal(rows.view(torch.int8), states[2].flatten())
            assert view[3].data_ptr() + group.layout.layer_nbytes <= memory.data_ptr() + 4 * PAGE
    wrong = caches | {names[0]: states[..., :-1]}
    with pytest.raises(ConfigurationError, match="states of shape"):
        group_planes(groups, wrong, 4)


# ------------------------------------------------------------------ which blocks are snapshots


def step(tables: Any, offers: Any = None, *, drafts: bool = False) -> SimpleNamespace:
    """A step of vLLM, as far as states are in it."""
    state = SimpleNamespace(
        boundary_state_offloads=offers or {}, get_block_ids=lambda name: tables if name else None
    )
    drafted = {"r": [1, 2]} if drafts else {}
    return SimpleNamespace(kv_connector_block_state=state, scheduled_spec_decode_tokens=drafted)


REQUEST = SimpleNamespace(request_id="r", num_prompt_tokens=3 * T + 5)
TABLES = ([0, 0, 7, 8], [0, 0, 9, 10], [1, 2, 3, 4])
ORDER = GroupOrder((2, 0, 1), (0, 1))


@pytest.mark.parametrize(
    ("end", "offers", "found"),
    [
        (3 * T, {}, {(0, 2): 7, (1, 2): 9}),
        (3 * T + 1, {}, {}),
        (2 * T, {}, {}),  # vLLM has no block of it
        (3 * T + 5, {"r": [(0, 7, 3 * T), (1, 9, 3 * T)]}, {(0, 2): 7, (1, 2): 9}),
        (3 * T + 5, {"r": [(0, 7, 2 * T + 8)]}, {}),  # inside of a block
        (3 * T + 5, {"other": [(0, 7, 3 * T)]}, {}),
    ],
)
def test_a_state_is_a_snapshot_where_a_step_ends_with_a_block(end, offers, found):
    assert ORDER.snapshots(step(TABLES, offers), REQUEST, end, T) == found


def test_behind_drafts_there_are_no_snapshots():
    """VLLM puts the state after the tokens that were accepted in its place later."""
    assert ORDER.snapshots(step(TABLES, drafts=True), REQUEST, 3 * T, T) == {}
    drafting = GroupOrder((2, 0, 1), (0, 1), has_drafts=True)
    assert drafting.snapshots(step(TABLES), REQUEST, 3 * T, T)
    assert drafting.snapshots(step(TABLES), REQUEST, 4 * T, T) == {}


def layouts() -> tuple[KvCacheLayout, KvCacheLayout]:
    states = KvCacheLayout.of_states([StateTensor(1, "s", (64,), torch.uint8)], T)
    return KvCacheLayout(1, 1, 2, 2, T, torch.float32), states


def request_of(num_tokens: int) -> LlmRequest:
    tokens = as_token_array(list(range(3, 3 + num_tokens)))
    root = BlockKey(b"r" * 32)
    return LlmRequest(1, tokens, chain_root=root, tokens_per_block=T)


def test_snapshots_are_reported_in_their_step_only():
    reader = StepReader(T, 35, GroupOrder((1, 0), (0,)))
    request = SimpleNamespace(request_id="r", num_tokens=3 * T, num_prompt_tokens=3 * T)
    tracked = Tracked(request, 0.0, llm=request_of(3 * T), num_tokens=3 * T)
    found = []
    for number in range(3):
        output = step(([0] * number + [10 + number], [1, 2, 3]))
        output.num_scheduled_tokens = {"r": T}
        output.scheduled_new_reqs = []
        output.scheduled_cached_reqs = SimpleNamespace(
            req_ids=["r"],
            resumed_req_ids={"r"} if number == 0 else set(),
            num_computed_tokens=[number * T],
            new_block_ids=[([10 + number], [1 + number])],
        )
        read = reader.read(output, {"r": tracked}, [])
        found += [one.new_block_ids_by_group for one in (*read.new_requests, *read.cached_requests)]
    assert found == [([1], [10]), ([2], [11]), ([3], [12])]


@pytest.fixture
def open_scheduler() -> Iterator[Callable[..., EngineScheduler]]:
    """Makes the pair's scheduler, which has looked a request up in an empty store."""
    made: list[EngineScheduler] = []

    def make(request: LlmRequest, *layouts: KvCacheLayout) -> EngineScheduler:
        args = LlmArgs(
            model="m",
            kv_cache_config=KvCacheConfig(),
            kv_connector_config=KvCacheConnectorConfig(url="memory:", save_partial_tails=False),
            layouts=layouts,
            model_digest=b"d" * 32,
        )
        made.append(EngineScheduler(args))
        made[0].on_new_request(request)
        made[0]._finding._prompts[1].lookup.result(30)
        return made[0]

    yield make
    for scheduler in made:
        scheduler.shutdown()


def reported(computed: int, scheduled: int, *by_group: list[int]) -> RequestData:
    """What a step reports of the request."""
    return RequestData(
        request_id=1,
        new_tokens=[],
        new_block_ids=by_group[0],
        computed_position=computed,
        num_scheduled_tokens=scheduled,
        new_block_ids_by_group=by_group,
        priorities=[35] * len(by_group[0]),
    )


def test_a_snapshot_that_was_not_saved_is_not_saved_later(open_scheduler):
    """By then its block holds another state."""
    request = request_of(2 * T)
    scheduler = open_scheduler(request, *layouts())
    step = SchedulerOutput()
    step.new_requests.append(reported(0, 2 * T, [5, 6], [-1, 9]))
    meta = scheduler.build_connector_meta(step)
    ordered = {(block.group, block.block_id) for order in meta.saves for block in order.blocks}
    assert ordered == {(0, 5), (0, 6), (1, 9)}
    scheduler.update_from_workers([WorkerMeta({1: 0})])
    request.num_computed_tokens = 2 * T
    assert scheduler.request_finished(request, [5, 6])
    [end] = scheduler.build_idle_meta().ended
    assert {(block.group, block.block_id) for block in end.blocks} == {(0, 5), (0, 6)}


def test_every_snapshot_of_an_answer_is_saved_in_its_step(open_scheduler):
    """The engine does not keep it to the end, so none is left for then."""
    request = request_of(T + 1)
    request.append_tokens(as_token_array(list(range(2 * T))))
    other = KvCacheLayout.of_states([StateTensor(2, "s", (64,), torch.uint8)], T)
    scheduler = open_scheduler(request, *layouts(), other)
    found = []
    for number in range(3):
        data = reported(number * T, T, *([first + number] for first in (5, 15, 25)))
        step = SchedulerOutput()
        (step.cached_requests if number else step.new_requests).append(data)
        (order,) = scheduler.build_connector_meta(step).saves
        found.append({(block.group, block.number, block.block_id) for block in order.blocks})
    assert found == [{(0, n, 5 + n), (1, n, 15 + n), (2, n, 25 + n)} for n in range(3)]
    request.num_computed_tokens = 3 * T
    assert not scheduler.request_finished(request, [5, 6, 7])


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("more", "settings", "says"),
    [
        ({"cache_config": SimpleNamespace(use_replayssm=True)}, {}, "use_replayssm"),
        ({}, {"save_on": "finish"}, "save_on='full'"),
    ],
)
def test_settings_that_states_cannot_be_stored_with_are_refused(more, settings, says):
    refuse_states(engine_config(), KvCacheConnectorConfig(url="memory:"))
    with pytest.raises(ConfigurationError, match=says):
        refuse_states(engine_config(**more), KvCacheConnectorConfig(url="memory:", **settings))


def test_states_are_those_of_one_build_of_an_engine(monkeypatch):
    """Kernels for a CPU have them transposed, under the same shape."""
    before = variant_of(engine_config(), layouts())["states"]
    cpu = engine_config(device_config=SimpleNamespace(device_type="cpu"))
    kernels = engine_config(mamba_config=SimpleNamespace(backend="flashinfer"))
    found = {before, variant_of(cpu, layouts())["states"], variant_of(kernels, layouts())["states"]}
    monkeypatch.setattr("kvconnect.integrations.vllm.identity.vllm_version", lambda: "0.99")
    found.add(variant_of(engine_config(), layouts())["states"])
    assert len(found) == 4
    assert "states" not in variant_of(engine_config(), layouts()[:1])


# ------------------------------------------------------------------ quantised caches


def test_scales_in_the_page_are_stored_with_it():
    inline = attention(
        kv_quant_mode=Mode.FP8_PER_TOKEN_HEAD,
        dtype=torch.uint8,
        state_content_bytes=24,
        state_content_size_bytes=24,
    )
    groups = cache_groups(groups_of((["model.layers.0.attn"], inline)))
    cache = torch.arange(4 * 2 * T * 24).to(torch.uint8).view(4, 2, T, 24)
    [planes] = group_planes(groups, {"model.layers.0.attn": cache}, 4)
    whole = torch.cat(planes.views, dim=-1).transpose(1, 2)
    assert torch.equal(whole, cache)
    assert groups[0].layout.block_nbytes == cache[0].numel()


def test_scales_of_the_checkpoint_leave_keys_and_values_as_they_are():
    by_tensor = attention(kv_quant_mode=Mode.FP8_PER_TENSOR, dtype=torch.uint8)
    [group] = cache_groups(groups_of((["model.layers.0.attn"], by_tensor)))
    assert (group.layout.num_kv_heads, group.layout.key_dim) == (2, 8)


@pytest.mark.parametrize(
    "more",
    [
        {"kv_quant_mode": Mode.TURBOQUANT_4BIT_NC},
        {"state_content_bytes": 24},  # packed, and not said how
        {"kv_quant_mode": Mode.FP8_PER_TOKEN_HEAD, "state_content_bytes": 25},
    ],
)
def test_what_is_not_described_is_refused(more):
    packed = {"dtype": torch.uint8, "state_content_size_bytes": more.get("state_content_bytes")}
    with pytest.raises(ConfigurationError, match=r"quantised as|packed by"):
        cache_groups(groups_of((["model.layers.0.attn"], attention(**(packed | more)))))


def test_each_form_of_a_quantised_cache_has_its_keys(monkeypatch):
    layout = KvCacheLayout(1, 1, 8, 8, T, torch.uint8)

    def named(name: str) -> str:
        cache = SimpleNamespace(cache_dtype=name)
        return variant_of(engine_config(cache_config=cache), [layout])["kv_cache_dtype"]

    names = ["fp8", "fp8_e5m2", "fp8_per_token_head", "nvfp4"]
    before = [named(name) for name in names]
    assert len(set(before)) == 4
    monkeypatch.setattr("kvconnect.integrations.vllm.identity.vllm_version", lambda: "0.99")
    after = [named(name) for name in names]
    assert after[:2] == before[:2]
    assert not set(after[2:]) & set(before)  # an arrangement of one release


def test_scales_found_while_running_are_refused():
    found = SimpleNamespace(calculate_kv_scales=True)
    with pytest.raises(ConfigurationError, match="calculate_kv_scales: the scales"):
        refuse_unserved(engine_config(cache_config=found))


# ------------------------------------------------------------------ draft layers


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "draft_model", "ngram", "suffix"])
def test_drafts_that_do_not_change_answers_are_served(method):
    refuse_drafts(SimpleNamespace(method=method))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"method": "dflash"}, "method='dflash'"),
        ({"method": "eagle", "rejection_sample_method": "fly"}, "rejection_sample_method='fly'"),
    ],
)
def test_drafts_that_might_are_refused(more, says):
    with pytest.raises(ConfigurationError, match=says):
        refuse_drafts(SimpleNamespace(**more))


def test_the_draft_model_is_in_the_keys(tmp_path: Path):
    def named(seed: int) -> dict[str, str]:
        made = make_model(tmp_path / str(seed), "llama", seed=seed)
        draft = SimpleNamespace(model=str(made))
        return draft_variant(
            SimpleNamespace(method="draft_model", draft_model_config=draft), since_ns=2**62
        )

    one, other = named(1), named(2)
    assert one.keys() == other.keys() == {"drafts"}
    assert one != other
    assert draft_variant(SimpleNamespace(method="ngram"), since_ns=None) == {}
    assert draft_variant(None, since_ns=None) == {}
