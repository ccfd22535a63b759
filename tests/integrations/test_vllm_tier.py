"""The parts of the tier that need no vLLM: what it asks, in which order, and what it believes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm_configs import engine_config

from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.connector.io import access
from kvconnect.connector.io.access import LOADS_IN_FLIGHT, Access
from kvconnect.connector.io.strided import HostCopier
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.vllm_tier import identity
from kvconnect.integrations.vllm_tier import pause as pauses
from kvconnect.integrations.vllm_tier.identity import ChunkNames, chunk_layout
from kvconnect.integrations.vllm_tier.lookups import Finder, Lookups
from kvconnect.integrations.vllm_tier.pause import StepPause
from kvconnect.integrations.vllm_tier.requests import Parents
from kvconnect.integrations.vllm_tier.settings import KvConnectTierSettings
from kvconnect.integrations.vllm_tier.transfers import ChunkLoads, ChunkSave, Saves
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.testing.faults.faulty_backend import FaultyBackend

ROW = 8192
ROWS = 16


def chunk(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "little") + group.to_bytes(4, "big")


def request_of(name: str, positions: dict[bytes, int]) -> SimpleNamespace:
    return SimpleNamespace(req_id=name, get_offload_key_position=positions.get)


# ---------------------------------------------------------------------- lookups


def answered(lookups: Lookups, **found: bool) -> None:
    """Every question of this step gets its answer: ``c3=True``."""
    asked = [pair for one in lookups.take_questions() for pair in one]
    lookups.answer([(name, number, found[f"c{name[0]}"]) for name, number in asked])


A, B = request_of("a", {}), request_of("b", {})


def test_a_chunk_is_asked_for_once_and_answered_in_a_later_step():
    lookups = Lookups(10)
    assert [lookups.lookup(chunk(1), one) for one in (A, A, B)] == [None] * 3
    assert lookups.unanswered
    [[(asked, number)]] = lookups.take_questions()
    assert (asked, lookups.take_questions()) == (chunk(1), [])
    lookups.answer([(asked, number, True)])
    lookups.unanswered = False
    assert [lookups.lookup(chunk(1), one) for one in (A, B)] == [True, True]
    assert not lookups.unanswered


def test_what_was_missing_is_asked_for_again_by_the_next_request_only():
    lookups = Lookups(10)
    lookups.lookup(chunk(1), A)
    answered(lookups, c1=False)
    assert lookups.lookup(chunk(1), A) is False
    assert lookups.take_questions() == []
    assert lookups.lookup(chunk(1), B) is None
    answered(lookups, c1=True)
    assert lookups.lookup(chunk(1), B)


def test_what_could_not_be_loaded_does_not_come_up_again_for_those_who_were_told_of_it():
    lookups = Lookups(10)
    lookups.lookup(chunk(1), A)
    answered(lookups, c1=True)
    lookups.missing([chunk(1), chunk(2)])
    assert lookups.lookup(chunk(1), A) is False
    assert lookups.take_questions() == []


def test_what_is_not_answered_in_time_is_missing_and_a_late_answer_is_not_taken():
    lookups = Lookups(0.0)
    lookups.lookup(chunk(1), A)
    [[(asked, number)]] = lookups.take_questions()
    assert lookups.lookup(chunk(1), A) is False
    lookups.answer([(asked, number, True)])
    assert lookups.lookup(chunk(1), A) is False


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["lookup", "forget", "ask", "answer"]),
            st.integers(1, 4),
            st.sampled_from("abc"),
        ),
        max_size=40,
    )
)
def test_nothing_is_kept_of_requests_that_ended(steps):
    lookups = Lookups(10)
    asked = []
    for what, number, request in steps:
        if what == "lookup":
            lookups.lookup(chunk(number), request_of(request, {}))
        elif what == "forget":
            lookups.forget(request)
        elif what == "ask":
            asked += [pair for one in lookups.take_questions() for pair in one]
        else:
            lookups.answer([(name, number, True) for name, number in asked])
    for request in "abc":
        lookups.forget(request)
    assert len(lookups) == 0
    assert not lookups._of_request


PLACES = {chunk(number, group): 32 * number for number in (1, 2, 3) for group in (0, 1)}


def looks(*requests: SimpleNamespace) -> Callable[..., list[bool | None]]:
    """A function that looks chunks up of which the store has been asked before, in one step."""
    lookups = Lookups(10)
    for request in requests:
        for one in PLACES:
            lookups.lookup(one, request)

    def look(request: SimpleNamespace, *chunks: bytes, ends_step: bool = False) -> list:
        if ends_step:
            lookups.take_questions()
        return [lookups.lookup(one, request) for one in chunks]

    return look


def test_a_look_from_the_front_ends_behind_a_chunk_that_is_waited_for():
    request, other = request_of("a", PLACES), request_of("b", PLACES)
    look = looks(request, other)
    assert look(request, chunk(1), chunk(2)) == [None, False]
    # Another look in the same step, one of another group, another request, and another step.
    found = look(request, chunk(1), chunk(3), chunk(1, 1), chunk(2, 1))
    assert found == [None, False, None, False]
    assert look(request, chunk(1), chunk(2, 1)) == [None, None]
    assert look(other, chunk(3, 1)) == [None]
    assert look(request, chunk(1)) == [None]
    assert look(request, chunk(2), chunk(2), ends_step=True) == [None, None]


def test_a_look_from_the_end_goes_on():
    request, unknown = request_of("a", PLACES), request_of("b", {})
    look = looks(request, unknown)
    assert look(request, chunk(3), chunk(2), chunk(1)) == [None] * 3
    assert look(unknown, chunk(1), chunk(2)) == [None, None]


# ---------------------------------------------------------------------- pauses of the scheduler


def ended(step: Callable[[], None]) -> bool:
    """Whether `step` comes to an end."""
    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def test_a_step_that_computes_nothing_waits_for_the_store(monkeypatch):
    monkeypatch.setattr(pauses, "_IDLE_S", 3600.0)
    monkeypatch.setattr(pauses, "_SHORT_S", 3600.0)
    pause = StepPause()
    pause.end_step(waits=False)
    steps = threading.Thread(target=lambda: pause.end_step(waits=True), daemon=True)
    steps.start()
    steps.join(0.05)
    assert steps.is_alive()
    pause.tell()
    steps.join(60)
    assert not steps.is_alive()
    pause.tell()  # before the step ends
    assert ended(lambda: pause.end_step(waits=True))


def test_a_step_that_computes_or_that_no_request_waits_in_does_not(monkeypatch):
    monkeypatch.setattr(pauses, "_IDLE_S", 3600.0)
    pause = StepPause()
    assert ended(lambda: pause.end_step(waits=False))
    monkeypatch.setattr(pauses, "_SHORT_S", 0.0)
    assert ended(lambda: pause.end_step(waits=True))


# ---------------------------------------------------------------------- parents


def test_chunks_are_stored_in_the_order_of_the_prompt_each_with_the_one_before_it():
    places = {chunk(number): 32 * number for number in range(1, 6)}
    parents = Parents({0: 32})
    request = request_of("a", places)
    parents.note(chunk(1), request)
    saves = parents.in_order([(chunk(4), 7), (chunk(2), 5), (chunk(3), 6)], request)
    assert saves == [
        ChunkSave(chunk(2), 5, chunk(1)),
        ChunkSave(chunk(3), 6, chunk(2)),
        ChunkSave(chunk(4), 7, chunk(3)),
    ]
    assert parents.in_order([(chunk(5), 8)], request) == [ChunkSave(chunk(5), 8, chunk(4))]
    parents.forget("a")
    assert not parents._last


def test_the_first_chunk_of_a_prompt_follows_none_and_one_of_unknown_place_an_unknown_one():
    parents = Parents({0: 32})
    request = request_of("a", {chunk(1): 32, chunk(3): 96})
    assert parents.in_order([(chunk(1), 0)], request) == [ChunkSave(chunk(1), 0, b"")]
    assert parents.in_order([(chunk(3), 0)], request) == [ChunkSave(chunk(3), 0, None)]
    other = request_of("b", {})
    assert parents.in_order([(chunk(9), 0)], other) == [ChunkSave(chunk(9), 0, None)]


# ---------------------------------------------------------------------- the store


class Tier:
    """Loads, saves and lookups between host memory and a store, as the tier puts them together."""

    def __init__(self, *, staging: int = 1 << 20, waiting: int = ROWS, timeout_s: float = 10):
        self.layout = chunk_layout(ROW, 32)
        self.store = FaultyBackend(MemoryBackend(64 << 20))
        config = KvCacheConnectorConfig(
            backend=self.store,
            load_timeout_s=timeout_s,
            save_timeout_s=timeout_s,
            staging_bytes=staging,
        )
        args = LlmArgs(
            model="",
            kv_cache_config=KvCacheConfig(tokens_per_block=self.layout.tokens_per_block),
            kv_connector_config=config,
            layouts=(self.layout,),
            model_digest=bytes(32),
        )
        self.host = torch.randint(0, 256, (ROWS, ROW), dtype=torch.uint8)
        pool = PagedKv.from_pool(self.host.view(self.layout.flat_shape(ROWS)), self.layout)
        self.access = opened = Access.open(args, [pool], HostCopier)
        self.opened = opened.store
        [self.copier] = opened.copiers
        own = ChunkNames(bytes(32), self.layout)

        def names() -> ChunkNames:
            return own

        self.ended: dict[int, object] = {}
        self.answers: dict[bytes, bool] = {}
        self.loads = ChunkLoads(opened, names, self.ended.__setitem__, timeout_s=timeout_s)
        self.saves = Saves(
            opened, names, self.ended.__setitem__, timeout_s=timeout_s, most_waiting=waiting
        )
        self.finder = Finder(opened, names, self._answer, timeout_s=timeout_s)

    def _answer(self, answers) -> None:
        self.answers |= {name: found for name, _, found in answers}

    def wait(self, *jobs: int) -> list[object]:
        self.until(lambda: all(job in self.ended for job in jobs))
        return [self.ended.pop(job) for job in jobs]

    def until(self, condition) -> None:
        until = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.002)

    def save(self, job: int, numbers) -> None:
        numbers = list(numbers)
        saves = [ChunkSave(chunk(one), one % ROWS, None) for one in numbers]
        self.saves.submit(job, saves)

    def set(self, fault: str) -> None:
        self.opened.io.call_soon(lambda: self.store.set(fault))

    def look(self, names) -> list[bool]:
        self.answers.clear()
        self.finder.find([[(name, 0) for name in names]])
        self.until(lambda: len(self.answers) == len(names))
        return [self.answers[name] for name in names]


@pytest.fixture
def tier():
    made: list[Tier] = []

    def make(**limits) -> Tier:
        made.append(Tier(**limits))
        return made[0]

    yield make
    for one in made:
        one.set("none")
        one.access.close()


def test_chunks_come_back_from_the_store_as_they_were(tier):
    kept = tier()
    before = kept.host.clone()
    kept.save(1, range(8))
    assert kept.wait(1) == [8]
    kept.host.zero_()
    kept.loads.submit(2, [chunk(one) for one in range(8)], list(range(8, 16)))
    assert kept.wait(2) == [[chunk(one) for one in range(8)]]
    assert torch.equal(kept.host[8:], before[:8])


def test_a_job_of_any_size_is_moved_in_turns_while_nothing_waits(tier):
    kept = tier(staging=4 * (ROW + 4096), waiting=5)
    before = kept.host.clone()
    kept.save(1, range(ROWS))
    assert kept.wait(1) == [ROWS]
    kept.host.zero_()
    kept.loads.submit(2, [chunk(one) for one in range(ROWS)], list(range(ROWS)))
    assert len(kept.wait(2)[0]) == ROWS
    assert torch.equal(kept.host, before)


def test_each_group_of_a_job_counts_as_far_as_it_is_whole(tier):
    kept = tier()
    kept.saves.submit(
        1, [ChunkSave(chunk(one, group), one, None) for group in (0, 1) for one in (1, 2, 4)]
    )
    kept.wait(1)
    asked = [chunk(one, group) for group in (0, 1) for one in (1, 2, 3 + group, 4)]
    asked = list(dict.fromkeys(asked))
    kept.loads.submit(2, asked, list(range(len(asked))))
    [loaded] = kept.wait(2)
    assert set(loaded) == {chunk(one, 0) for one in (1, 2)} | {chunk(one, 1) for one in (1, 2, 4)}


def test_loads_that_are_called_off_end_and_count_for_nothing(tier):
    kept = tier()
    kept.save(1, range(4))
    kept.wait(1)
    kept.set("hang")
    kept.host.zero_()
    kept.loads.submit(2, [chunk(one) for one in range(4)], list(range(4)))
    kept.loads.cancel()
    assert kept.wait(2) == [[]]
    kept.set("none")
    assert not kept.host.any()


def test_a_load_that_the_loop_has_not_begun_is_called_off_with_the_others(tier):
    kept = tier()
    kept.save(1, range(4))
    kept.wait(1)
    kept.host.zero_()
    busy, go_on = threading.Event(), threading.Event()
    kept.opened.io.call_soon(lambda: busy.set() or go_on.wait(60))
    assert busy.wait(60)
    kept.loads.submit(2, [chunk(one) for one in range(4)], list(range(4)))
    kept.loads.cancel()
    go_on.set()
    assert kept.wait(2) == [[]]
    assert not kept.host.any()


def test_nothing_is_copied_for_a_load_called_off_while_the_loop_is_stuck(tier):
    kept = tier()
    kept.save(1, range(4))
    kept.wait(1)
    kept.host.zero_()
    go_on, busy, unstuck = threading.Event(), threading.Event(), threading.Event()
    for _ in range(2):  # all threads that copy
        kept.opened.copying.submit(lambda: go_on.wait(60))
    kept.loads.submit(2, [chunk(one) for one in range(4)], list(range(4)))
    kept.until(lambda: any(one.copying for one in list(kept.loads._loads._running)))
    kept.opened.io.call_soon(lambda: busy.set() or unstuck.wait(60))
    assert busy.wait(60)
    kept.loads.cancel()
    go_on.set()
    behind = threading.Barrier(3)
    for _ in range(2):
        kept.opened.copying.submit(lambda: behind.wait(60))
    behind.wait(60)
    unstuck.set()
    assert kept.wait(2) == [[]]
    assert not kept.host.any()


def test_what_a_load_had_brought_counts_for_nothing_when_it_is_called_off(tier, monkeypatch):
    monkeypatch.setattr(access, "CALL_NBYTES", ROW + 4096)  # a chunk of a call
    kept = tier()
    kept.save(1, range(2))
    kept.wait(1)
    backend, go_on = kept.opened.backend, asyncio.Event()
    load, first = backend.load, [True]

    async def load_one(keys, into):
        if not first:
            await go_on.wait()
        first.clear()
        return await load(keys, into)

    monkeypatch.setattr(backend, "load", load_one)
    kept.loads.submit(2, [chunk(0), chunk(1)], [0, 1])
    kept.until(lambda: any(any(one.copied) for one in list(kept.loads._loads._running)))
    kept.loads.cancel()
    assert kept.wait(2) == [[]]
    kept.opened.io.call_soon(go_on.set)


def test_what_has_arrived_is_copied_while_more_is_loaded(tier, monkeypatch):
    monkeypatch.setattr(access, "CALL_NBYTES", 2 * ROW + 8192)  # two chunks of a call
    one = tier()
    one.save(1, range(ROWS))
    assert one.wait(1) == [ROWS]
    before = one.host.clone()
    one.host.zero_()
    calls: list[int] = []
    backend, go_on = one.opened.backend, threading.Event()
    load, copy_in = backend.load, one.copier.copy_in
    monkeypatch.setattr(
        backend, "load", lambda keys, into: calls.append(len(keys)) or load(keys, into)
    )
    monkeypatch.setattr(one.copier, "copy_in", lambda *what: go_on.wait(60) and copy_in(*what))
    one.loads.submit(2, [chunk(number) for number in range(ROWS)], list(range(ROWS)))
    # Nothing is in its place yet, and all that may be under way is: the rest has no memory.
    one.until(lambda: len(calls) == 2 * LOADS_IN_FLIGHT)
    assert 2 not in one.ended
    go_on.set()
    assert len(one.wait(2)[0]) == ROWS
    assert calls == [2] * (ROWS // 2)
    assert torch.equal(one.host, before)


def test_a_job_without_chunks_ends(tier):
    kept = tier()
    kept.loads.submit(1, [], [])
    kept.saves.submit(2, [])
    assert [len(kept.wait(1)[0]), kept.wait(2)] == [0, [0]]


def test_saves_beyond_what_may_wait_are_lost_and_their_jobs_end(tier):
    kept = tier(waiting=5)
    kept.set("hang")
    kept.save(1, range(4))
    kept.save(2, range(4, 16))
    kept.set("none")
    first, second = kept.wait(1, 2)
    assert first in {0, 4}
    assert second < 12
    kept.save(3, range(4))
    assert kept.wait(3) == [4]


def test_what_waits_when_the_tier_closes_is_lost(tier):
    kept = tier(staging=1 * (ROW + 4096))
    kept.set("hang")
    kept.save(1, range(8))
    kept.saves.close()
    kept.set("none")
    [stored] = kept.wait(1)
    assert stored < 8
    kept.save(2, range(8))
    assert kept.wait(2) == [0]


def test_lookups_answer_for_each_chunk_up_to_some_gaps(tier):
    kept = tier()
    present = [1, 2, 5, 6, 7, 9]
    kept.saves.submit(1, [ChunkSave(chunk(one), 0, None) for one in present])
    kept.wait(1)
    asked = range(1, 11)
    assert kept.look([chunk(one) for one in asked]) == [one in present for one in asked]
    sparse = [chunk(one + 100) for one in range(20)] + [chunk(1)]
    assert kept.look(sparse) == [False] * 21


def test_a_store_that_fails_has_nothing(tier):
    kept = tier()
    kept.save(1, range(3))
    kept.wait(1)
    kept.set("raise")
    assert kept.look([chunk(one) for one in range(3)]) == [False] * 3


# ---------------------------------------------------------------------- names and settings


def test_names_differ_with_the_model_the_group_and_the_hash():
    layout = chunk_layout(ROW, 32)
    one, other = ChunkNames(bytes(32), layout), ChunkNames(b"\1" * 32, layout)
    keys = {
        one.block_key(chunk(1)),
        one.block_key(chunk(2)),
        one.block_key(chunk(1, group=1)),
        one.block_key(b""),
        other.block_key(chunk(1)),
    }
    assert len(keys) == 5
    assert one.block_key(chunk(1)) == ChunkNames(bytes(32), layout).block_key(chunk(1))


@given(st.integers(1, 64), st.integers(1, 4096))
def test_a_row_of_any_length_is_a_block(pages, tokens):
    layout = chunk_layout(pages * 4096, tokens)
    assert layout.block_nbytes == pages * 4096
    assert layout.tokens_per_block == 2 or tokens % layout.tokens_per_block == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "KvConnectTier.url: is missing; give a store: 'disk:///"),
        ({"url": "memory:", "codec": "fp8"}, "KvConnectTier.codec: fp8 rounds numbers"),
        ({"url": "memory:", "save_timeout_s": 0}, "save_timeout_s=0"),
        ({"url": "memory:", "locality": "near"}, "locality='near'"),
    ],
)
def test_a_wrong_setting_is_named(settings, said):
    with pytest.raises(ConfigurationError) as refused:
        KvConnectTierSettings(**settings)
    assert said in str(refused.value)


def configuration(**more: object) -> SimpleNamespace:
    """What the tier reads of vLLM's configuration."""
    cache = SimpleNamespace(prefix_caching_hash_algo="sha256")
    return engine_config(**{"cache_config": cache, "lora_config": None} | more)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"cache_config": SimpleNamespace(prefix_caching_hash_algo="xxhash")}, "algo=xxhash"),
        ({"lora_config": "of adapters"}, "enable_lora"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "method=eagle"),
        ({"speculative_config": SimpleNamespace(method=None)}, "method=None"),
        (
            {
                "cache_config": SimpleNamespace(
                    prefix_caching_hash_algo="sha256_cbor", calculate_kv_scales=True
                )
            },
            "calculate_kv_scales",
        ),
        ({"load_config": SimpleNamespace(load_format="dummy")}, "load_format=dummy"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_the_names_of_chunks_would_not_cover_is_refused(more, said):
    def name(config: SimpleNamespace) -> None:
        identity._check(config)
        identity._model_digest(config, None)

    identity._check(configuration(speculative_config=SimpleNamespace(method="ngram")))
    with pytest.raises(ConfigurationError, match=said):
        name(configuration(**more))
