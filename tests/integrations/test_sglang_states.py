"""Recurrent states behind SGLang's hierarchical cache, over stand-ins for its host pools."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from sglang_pools import (
    SLOTS,
    StandInPool,
    StandInStates,
    damage,
    fill,
    fill_states,
    hashes,
    indices,
    page_content,
    state_content,
    state_round_trip,
    storage_config,
    transfer,
)

from kvconnect.errors import UnsupportedModel
from kvconnect.integrations.sglang import KvConnectStorage, server, settings
from kvconnect.keys import store_key

_INTERFACE = "sglang.srt.mem_cache.hicache_storage"
ASK = [transfer(["__placeholder__"])]
"""What SGLang's lookups ask for: its states have no keys before the hit is known."""

Open = Callable[..., tuple[KvConnectStorage, StandInPool]]


@dataclass
class PoolTransferResult:
    """As SGLang defines it."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@pytest.fixture
def opened(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A storage over a pool of pages and this pool of states."""

    def make(
        states: StandInStates, seed: int = 0, *, url: str | None = None, is_mla=False, **more
    ) -> tuple[KvConnectStorage, StandInPool]:
        pool = StandInPool("page_first", is_mla=is_mla)
        fill(pool, seed)
        url = url or f"disk://{tmp_path}/kv?capacity=64MiB"
        storage = KvConnectStorage(storage_config(tiny, url, is_mla=is_mla, **more), {})
        made.append(storage)
        storage.register_mem_pool_host(pool)
        storage.register_mem_host_pool_v2(pool, "kv")
        storage.register_mem_host_pool_v2(states, "mamba")
        return storage, pool

    interface = ModuleType(_INTERFACE)
    interface.PoolTransferResult = PoolTransferResult
    monkeypatch.setitem(sys.modules, _INTERFACE, interface)
    made: list[KvConnectStorage] = []
    yield make
    for storage in made:
        storage.close()


def filled(**shapes) -> StandInStates:
    pool = StandInStates(**shapes)
    fill_states(pool)
    return pool


def save(storage: KvConnectStorage, names: list[str], ends: list[int]) -> None:
    """Saves states of slots 0, 1, … at these ends, then all pages: the order of SGLang's calls."""
    for slot, end in enumerate(ends):
        assert storage.batch_set_v2([transfer([names[end - 1]], [slot])]) == {"mamba": [True]}
        assert storage._access.flush(60)
    assert storage.batch_set_v1(names, indices(range(len(names)))) == [True] * len(names)
    assert storage._access.flush(60)


def hit(storage: KvConnectStorage, names: list[str]) -> int:
    found = storage.batch_exists_v2(names, ASK)
    assert found.restorable_prefix_pages == [found.kv_hit_pages] * bool(found.kv_hit_pages)
    return found.kv_hit_pages


def get(storage: KvConnectStorage, name: str, slot: int) -> bool:
    (got,) = storage.batch_get_v2([transfer([name], [slot])])["mamba"]
    return got


@pytest.mark.parametrize("is_mla", [False, True])
@pytest.mark.parametrize(
    "shapes",
    [
        {},
        {"shape": (3, 5, 7), "conv": ((5, 3), (7, 2))},
        {"shape": (2, 8, 8), "dtype": torch.bfloat16},
        {"shape": (0,), "conv": ((24, 2),)},
    ],
)
def test_states_come_back_byte_for_byte(opened: Open, shapes, is_mla):
    state_round_trip(
        lambda states, seed: opened(states, seed, is_mla=is_mla),
        StandInStates(**shapes),
        StandInStates(**shapes),
    )


def test_a_prefix_ends_at_the_last_state_of_its_stored_pages(opened: Open):
    """Pages and states are stored at random; every hit is compared with a model."""
    rng = random.Random(1)
    storage, pool = opened(states := filled(), url="memory:")
    saved = [state_content(states, slot) for slot in range(3)]
    pages = [page_content(pool, page) for page in range(6)]
    for case in range(200):
        names = hashes(6, f"case {case}")
        there = [rng.random() < 0.8 for _ in names]
        ends = {end: rng.randrange(3) for end in range(1, 7) if rng.random() < 0.4}
        for end, slot in ends.items():
            storage.batch_set_v2([transfer([names[end - 1]], [slot])])
        for number, name in enumerate(names):
            if there[number]:
                storage.batch_set_v1([name], indices([number]))
        assert storage._access.flush(60)
        expected = max((end for end in ends if all(there[:end])), default=0)
        assert hit(storage, names) == expected
        if not expected:
            continue
        assert storage.batch_get_v1(names[:expected], indices(range(6, 6 + expected)))[-1]
        assert get(storage, names[expected - 1], 5)
        assert torch.equal(state_content(states, 5), saved[ends[expected]])
        for number in range(expected):
            assert torch.equal(page_content(pool, 6 + number), pages[number])


@pytest.mark.parametrize("is_mla", [False, True])
def test_each_rank_saves_its_part_and_a_state_counts_once_all_are_there(opened: Open, is_mla):
    names = hashes(3)
    pools = [filled(), filled()]
    fill_states(pools[1], 7)
    first, second = (
        opened(one, tp_rank=rank, tp_size=2, is_mla=is_mla)[0] for rank, one in enumerate(pools)
    )
    save(first, names, [3])
    second.batch_set_v1(names, indices([0, 1, 2]))
    assert second._access.flush(60)
    assert (hit(first, names), hit(second, names)) == (0, 0)
    save(second, names, [3])
    assert (hit(first, names), hit(second, names)) == (3, 3)
    for storage, pool in zip((first, second), pools, strict=True):
        saved = state_content(pool, 0)
        assert get(storage, names[2], 4)
        assert torch.equal(state_content(pool, 4), saved)


def test_a_damaged_state_is_a_miss_and_leaves_its_slot_and_is_saved_anew(opened: Open, tmp_path):
    names = hashes(4)
    storage, _ = opened(filled())
    save(storage, names, [4, 2])
    storage.close()
    damage(tmp_path / "kv")  # inside the state that was saved first
    storage, _ = opened(states := filled())
    before = state_content(states, 5)
    assert hit(storage, names) == 4
    assert not get(storage, names[3], 5)
    assert torch.equal(state_content(states, 5), before)
    assert hit(storage, names) == 2
    assert get(storage, names[1], 5)
    assert storage.batch_set_v2([transfer([names[3]], [0])]) == {"mamba": [True]}
    assert storage._access.flush(60)
    assert hit(storage, names) == 4
    assert get(storage, names[3], 5)
    assert torch.equal(state_content(states, 5), state_content(states, 0))


def test_a_state_of_which_a_part_is_missing_is_a_miss(opened: Open):
    """States above 4 MiB are stored in parts."""
    states = filled(slots=2, shape=(5, 256, 256))
    storage, _ = opened(states, url="memory:", staging_bytes=32 << 20)
    names = hashes(2)
    save(storage, names, [2])
    before = state_content(states, 0)
    assert hit(storage, names) == 2
    assert get(storage, names[1], 1)
    assert torch.equal(state_content(states, 1), before)
    groups = storage._states.groups
    assert len(groups) > 1
    fill_states(states, 9)
    before = state_content(states, 1)
    for group in groups:
        store = storage._access._access.store
        (key,) = storage._keys([names[1]])
        store.io.submit(store.backend.delete([store_key(key, group)])).result()
        assert hit(storage, names) == 0
        assert not get(storage, names[1], 1)
        assert torch.equal(state_content(states, 1), before)
        save(storage, names, [2])
        assert hit(storage, names) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.bfloat16},
        {"shape": (8, 2, 8)},
        {"conv": ((3, 24),)},
        {"conv": ()},
    ],
)
def test_states_of_another_shape_or_dtype_are_not_found(opened: Open, other):
    names = hashes(3)
    storage, _ = opened(filled())
    save(storage, names, [3])
    storage.close()
    storage, _ = opened(filled(**other))
    assert hit(storage, names) == 0
    assert not get(storage, names[2], 5)
    storage.close()
    storage, _ = opened(filled())
    assert hit(storage, names) == 3


def test_states_of_other_kernels_are_not_found(opened: Open, monkeypatch):
    names = hashes(3)
    storage, _ = opened(filled())
    save(storage, names, [3])
    storage.close()
    with monkeypatch.context() as patch:
        patch.setattr(
            server.Server, "setting", lambda _, name: {"linear_attn_backend": "cutedsl"}.get(name)
        )
        storage, _ = opened(filled())
        assert hit(storage, names) == 0
        storage.close()
    storage, _ = opened(filled())
    assert hit(storage, names) == 3


def test_what_sglang_does_not_ask_for_is_missing(opened: Open):
    names = hashes(3)
    storage, _ = opened(states := filled())
    save(storage, names, [3])
    before = [state_content(states, slot) for slot in range(SLOTS)]
    odd = [
        [transfer(["a"], name="swa")],
        [transfer(["a"], hit_policy="all_pages")],
        [transfer(["a", "b"])],
        [*ASK, transfer(["a"], name="indexer")],
    ]
    for ask in odd:
        found = storage.batch_exists_v2(names, ask)
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
    for move in (storage.batch_get_v2, storage.batch_set_v2):
        assert move([transfer([names[2]])]) == {"mamba": [False]}
        assert move([transfer([names[2]], [1, 2])]) == {"mamba": [False]}
        assert move([transfer([names[2]], [1], name="swa")]) == {"swa": [False]}
    with pytest.raises(IndexError):
        storage.batch_get_v2([transfer([names[2]], [SLOTS])])
    storage._choice.choose = lambda *_: None  # computing is faster
    assert hit(storage, names) == 0
    storage.close()
    assert hit(storage, names) == 0
    assert not get(storage, names[2], 5)
    assert storage.batch_set_v2([transfer([names[2]], [1])]) == {"mamba": [False]}
    assert all(map(torch.equal, (state_content(states, n) for n in range(SLOTS)), before))


def test_a_storage_without_states_has_none(tiny, opened: Open):
    names = hashes(2)
    storage = KvConnectStorage(storage_config(tiny, "memory:"), {})
    storage.register_mem_pool_host(StandInPool("page_first"))
    storage.batch_set_v1(names, indices([0, 1]))
    assert storage._access.flush(60)
    assert storage.batch_exists(names) == 2
    assert storage.batch_exists_v2(names, ASK).kv_hit_pages == 0
    assert storage.batch_get_v2([transfer([names[1]], [0])]) == {"mamba": [False]}
    storage.close()


@pytest.mark.parametrize(
    ("attribute", "value", "complaint"),
    [
        ("layout", "layer_first", "page_first"),
        ("mtp_draft_buffer_infos", (object(),), "draft model"),
        ("slot_state_buffers", [torch.zeros(1)], "side states"),
        ("page_size", 4, "4 states"),
        ("num_mamba_layers", 4, "are served"),
        ("get_page_buffer_meta", lambda _: ([64], [8]), "cannot be served"),
    ],
)
def test_states_of_another_form_are_refused(opened: Open, attribute, value, complaint):
    states = StandInStates()
    setattr(states, attribute, value)
    with pytest.raises(UnsupportedModel, match=complaint):
        opened(states)


def test_states_whose_layers_or_scales_are_unknown_are_refused(opened: Open):
    with pytest.raises(UnsupportedModel, match="pp-size=2"):
        opened(StandInStates(), pp_size=2)
    int8 = SimpleNamespace(is_set=lambda name: name == "enable_int8_mamba_checkpoint")
    with pytest.raises(UnsupportedModel, match="int8"):
        settings.refuse_unserved_states(int8, num_stages=1)
