"""What a leader tells its followers, without processes."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.cache.memory.copier import TensorCopier
from kvconnect.cache.memory.pool_tensor import allocate_host_pool, allocate_pool
from kvconnect.engine.model.sequence_step import SequenceStep
from kvconnect.engine.ranks.copies import LoggedCopier, make_copies
from kvconnect.engine.ranks.messages import PlanReader, PlanWriter
from kvconnect.engine.ranks.settings import RankSettings, check_tensor_parallel_size, rank_device
from kvconnect.errors import ConfigurationError, RankDivergence
from kvconnect.layout import KvCacheLayout


def step_of(*tables, start=0, tokens=(0,), wanted=1, is_prompt=False) -> SequenceStep:
    return SequenceStep(
        1,
        start,
        tokens=np.array(tokens, np.int32),
        num_wanted=wanted,
        is_prompt=is_prompt,
        tables=tuple(np.array(table, np.int64) for table in tables),
    )


TABLES = st.lists(st.integers(-1, 40), max_size=12)
SEQUENCES = st.builds(
    step_of,
    TABLES,
    TABLES,
    start=st.integers(0, 2**31),
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4),
    wanted=st.integers(1, 4),
    is_prompt=st.booleans(),
)
PLANS = st.lists(st.dictionaries(st.integers(0, 4), SEQUENCES, max_size=4), max_size=6)


def numbered(plan: dict[int, SequenceStep]) -> list[SequenceStep]:
    return [replace(one, request_id=number) for number, one in plan.items()]


def comparable(one: SequenceStep) -> tuple[object, ...]:
    tables = tuple(table.tolist() for table in one.tables)
    return (one.request_id, one.start, one.tokens.tolist(), one.num_wanted, one.is_prompt, tables)


@given(PLANS)
def test_a_follower_gets_the_plans_of_the_leader(plans):
    writer, reader = PlanWriter(), PlanReader()
    for plan in map(numbered, plans):
        got = reader.plan(pickle.loads(pickle.dumps(writer.message(plan))))
        assert [comparable(one) for one in got] == [comparable(one) for one in plan]


def test_a_block_table_is_told_once():
    writer = PlanWriter()
    writer.message([step_of(range(1000))])
    (message,) = writer.message([step_of([-1, *range(1, 1001)])])
    assert (message.places[0].tolist(), message.blocks[0].tolist()) == ([0, 1000], [-1, 1000])


def test_a_follower_that_missed_a_message_does_not_guess():
    writer = PlanWriter()
    writer.message([step_of([4, 5])])
    with pytest.raises(RankDivergence, match="request 1: blocks of its table were never sent"):
        PlanReader().plan(writer.message([step_of([4, 5])]))


def test_all_copies_of_the_leader_are_made_by_its_followers():
    layout = KvCacheLayout(2, 2, 4, 4, tokens_per_block=4, dtype=torch.float32)
    cpu = torch.device("cpu")

    def memory():
        pools = [allocate_pool(layout, 6, cpu)], [allocate_host_pool(layout, 4, cpu)]
        torch.manual_seed(1)
        for (pool,) in pools:
            pool.copy_(torch.rand(pool.shape))
        return pools

    leaders, followers = memory(), memory()
    log = []
    copier = LoggedCopier(log, *leaders, [layout])
    copier.offload(0, [0, 1], [2, 3])
    copier.onboard(0, np.array([2, 0]), np.array([4, 1]))
    copier.move(0, [4], [5])
    copier.copy_tokens(0, 5, 0, 3)
    copier.copy_tokens(0, 1, 2, 2, from_host=True)
    copies = pickle.loads(pickle.dumps(log))
    make_copies(TensorCopier(*followers, [layout]), copies)
    for (mine,), (yours,) in zip(leaders, followers, strict=True):
        assert torch.equal(mine, yours)
    assert len(copies) == 5


def test_settings_travel_whole(tmp_path):
    transfer = {"role": "prefill", "listen": "127.0.0.1:0", "secret": "s" * 32}
    settings = RankSettings(
        2,
        tmp_path,
        "float64",
        "cpu",
        None,
        KvCacheConfig(tokens_per_block=16, max_attention_window=(32, 64)),
        KvCacheConnectorConfig(url="disk:///x?capacity=1GiB", transfer=transfer),
    )
    assert RankSettings.decode(settings.encode()) == settings


def test_settings_with_more_fields_travel_as_what_they_are(tmp_path):
    from kvconnect.integrations.trtllm_shim.settings import KvCacheConnectorConfig as Theirs

    connector = Theirs(connector="lmcache-mp", server_url="tcp://here:5555")
    settings = RankSettings(2, tmp_path, "auto", "cpu", None, KvCacheConfig(), connector)
    arrived = RankSettings.decode(settings.encode()).connector
    assert type(arrived) is Theirs
    assert arrived == connector


def test_settings_that_other_ranks_cannot_import_are_refused(tmp_path):
    class Mine(KvCacheConfig):
        pass

    with pytest.raises(ConfigurationError, match=r"kv_cache: other ranks cannot import .*Mine"):
        RankSettings(2, tmp_path, "auto", "cpu", None, Mine(), None)


def test_a_store_that_lives_in_one_process_is_refused(tmp_path):
    from kvconnect.backends.memory import MemoryBackend

    connector = KvCacheConnectorConfig(backend=MemoryBackend(capacity=1 << 20))
    with pytest.raises(
        ConfigurationError, match=r"connector\.backend: with tensor_parallel_size=2"
    ):
        RankSettings(2, tmp_path, "auto", "cpu", None, KvCacheConfig(), connector)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True, None])
def test_a_bad_number_of_ranks_is_refused(size):
    with pytest.raises(ConfigurationError, match=r"tensor_parallel_size: .* at least 1"):
        check_tensor_parallel_size(size, None)


def test_a_cache_manager_of_ones_own_serves_one_rank():
    check_tensor_parallel_size(1, object())
    with pytest.raises(ConfigurationError, match=r"kv_cache_manager: .* serves one rank"):
        check_tensor_parallel_size(2, object())


@pytest.mark.parametrize(
    ("device", "devices"),
    [
        ("auto", ["cuda:0", "cuda:1"]),
        ("cuda", ["cuda:0", "cuda:1"]),
        ("cpu", ["cpu", "cpu"]),
    ],
)
def test_each_rank_has_a_gpu(device, devices, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [rank_device(device, rank, 2) for rank in range(2)] == devices
    with pytest.raises(ConfigurationError, match="3 ranks need as many GPUs, and there are 2"):
        rank_device("cuda", 0, 3)
    with pytest.raises(ConfigurationError, match="'cuda:1' is one device"):
        rank_device("cuda:1", 0, 2)
