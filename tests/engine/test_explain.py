"""Every prompt token under one outcome: the causes that a test plants are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from late_store import LateStore
from observed import check_rest, hold_forwards, patient, preempt, slow, words

from kvconnect import LLM, KvCacheConnectorConfig, RequestOutput, SamplingParams
from kvconnect.connector.io.open_store import store_ttl_s
from kvconnect.connector.io.save import SaveQueue
from kvconnect.connector.offload import OffloadScheduler
from kvconnect.engine.beside_loads import BesideLoads
from kvconnect.trace import metrics

T = 16
ONE = SamplingParams(max_tokens=1)
Open = Callable[..., LLM]
Span = tuple[int, int, str, str]


PROMPT = words(70)
OTHER = words(160, 1)


def ask(llm: LLM, prompt: list[int], params: SamplingParams = ONE, **more: object) -> RequestOutput:
    return llm.generate([prompt], params, **more)[0]


def outcomes(output: RequestOutput) -> dict[str, int]:
    """The tokens by outcome; their sum is checked."""
    tokens = output.explain().tokens
    assert sum(tokens.values()) == output.prompt_tokens
    return {str(outcome): count for outcome, count in tokens.items()}


def spans(output: RequestOutput) -> list[Span]:
    found = output.explain().spans
    return [(one.start, one.end, str(one.outcome), one.detail) for one in found]


# ---------------------------------------------------------------------- the device's cache alone


def test_never_seen_then_there_then_scored(llm: LLM):
    scored = SamplingParams(max_tokens=1, prompt_logprobs=1)
    assert outcomes(ask(llm, PROMPT)) == {"new": 69, "last": 1}
    assert outcomes(ask(llm, PROMPT)) == {"reused": 69, "last": 1}
    assert outcomes(ask(llm, PROMPT, scored)) == {"logprobs": 69, "last": 1}


def test_a_token_of_the_system_prompt_was_changed(llm: LLM):
    ask(llm, PROMPT)
    output = ask(llm, [*PROMPT[:37], 300 - PROMPT[37] >> 1, *PROMPT[38:]])
    assert spans(output) == [(0, 37, "reused", ""), (37, 69, "diverged", ""), (69, 70, "last", "")]
    there = output.explain().divergence
    assert there is not None
    assert there.position == 37
    assert list(there.cached) == PROMPT[37:48]


def test_a_date_in_the_prompt(llm: LLM):
    text = "You are a helpful assistant. Today is {}. Answer briefly, and in full sentences."
    llm.generate([text.format("Monday")], ONE)
    output = llm.generate([text.format("Friday")], ONE)[0]
    there = output.explain().divergence
    assert there is not None
    assert there.before.endswith("Today is ")
    assert there.prompt_text.startswith("Friday")
    assert there.cached_text.startswith("Monday"[: len(there.cached)])


def test_a_longer_conversation_is_new_behind_its_last_turn(llm: LLM):
    first = ask(llm, PROMPT, SamplingParams(max_tokens=20))
    turn = [*PROMPT, *first.output_token_ids, *words(30, 3)]
    assert outcomes(ask(llm, turn)) == {"reused": 89, "new": 30, "last": 1}


@pytest.mark.parametrize(
    ("field", "value"), [("cache_salt", "a"), ("lora_id", "b"), ("extra_key", "c")]
)
def test_the_same_tokens_in_another_namespace(llm: LLM, field: str, value: str):
    ask(llm, PROMPT)
    output = ask(llm, PROMPT, **{field: value})
    assert spans(output)[0] == (0, 64, "namespace", field)


def test_a_new_tenant_beyond_those_that_are_remembered(llm: LLM, monkeypatch):
    monkeypatch.setattr("kvconnect.engine.explainer._MOST_NAMESPACES", 2)
    for salt in "ab":
        ask(llm, PROMPT, cache_salt=salt)
    assert outcomes(ask(llm, PROMPT, cache_salt="c")) == {"new": 69, "last": 1}
    assert spans(ask(llm, PROMPT, cache_salt="d"))[0] == (0, 64, "namespace", "cache_salt")


def test_evicted(open_llm: Open, llama: Path):
    llm = open_llm(llama, max_tokens=12 * T)
    ask(llm, PROMPT)
    ask(llm, OTHER)
    found = outcomes(ask(llm, PROMPT))
    assert found.pop("last") == 1
    assert found.pop("evicted") >= 37
    assert set(found) <= {"reused"}


def test_parts_of_blocks_are_lost_where_the_cache_does_not_divide_them(open_llm: Open, llama: Path):
    from kvconnect import KvCacheConfig

    config = KvCacheConfig(tokens_per_block=T, max_tokens=1024, enable_partial_reuse=False)
    llm = open_llm(llama, kv_cache=config)
    ask(llm, PROMPT)
    output = ask(llm, [*PROMPT[:37], 300 - PROMPT[37] >> 1, *PROMPT[38:]])
    assert outcomes(output) == {"reused": 32, "tail": 5, "diverged": 32, "last": 1}


def test_a_preempted_prompt_counts_once(open_llm: Open, llama: Path):
    llm = open_llm(llama, max_num_tokens=16)
    preempt(llm, lambda request: request.num_computed_tokens >= 32, once=True)
    output = ask(llm, PROMPT)
    assert output.preemptions == 1
    assert outcomes(output) == {"new": 69, "last": 1}


def test_an_aborted_prompt_has_not_reached_its_end(open_llm: Open, llama: Path):
    llm = open_llm(llama, max_num_tokens=16)
    gate, reached = hold_forwards(llm)
    handle = llm.submit(PROMPT, ONE)
    assert reached.wait(60)
    handle.abort()
    gate.set()
    found = outcomes(handle.result())
    assert found["unreached"] >= 54
    assert set(found) <= {"unreached", "new"}


def test_completions_share_the_account_of_their_prompt(llm: LLM):
    output = ask(llm, PROMPT, SamplingParams(max_tokens=3, n=3, temperature=1.0))
    assert outcomes(output) == {"new": 69, "last": 1}


def test_pools_with_windows(open_llm: Open, mixed: Path):
    llm = open_llm(mixed)
    assert outcomes(ask(llm, PROMPT)) == {"new": 69, "last": 1}
    assert outcomes(ask(llm, PROMPT))["reused"] >= 64


# ---------------------------------------------------------------------- a store


@pytest.fixture
def store() -> LateStore:
    return LateStore()


@pytest.fixture
def open_stored(open_llm: Open, llama: Path, store: LateStore) -> Open:
    return lambda **more: open_llm(llama, connector=patient(store, **more))


@pytest.fixture
def stored(open_stored: Open) -> LLM:
    """Has PROMPT in its store, and not on the device."""
    llm = open_stored()
    refill(llm, PROMPT)
    return llm


def refill(llm: LLM, prompt: list[int], **more: object) -> None:
    """Has `prompt` in the store, and not on the device."""
    ask(llm, prompt, **more)
    llm._engine._connector._worker._queue.flush(60)
    check_rest(llm)


def empty(store: LateStore) -> None:
    store.frames.clear()
    store.after.clear()


def guard(llm: LLM) -> Any:
    return llm._engine._connector._scheduler._finding.store.backend


@contextmanager
def away(llm: LLM) -> Iterator[None]:
    """The store has failed before, and is not asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(guard(llm)), "available", property(lambda _: False))
        yield


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [(0, 69, "reused", "")]),
        ({"save_partial_tails": False}, [(0, 64, "reused", ""), (64, 69, "tail", "")]),
        ({"min_priority": 50}, [(0, 69, "not_saved", "below min_priority")]),
    ],
    ids=str,
)
def test_what_is_stored(open_stored: Open, settings: dict[str, Any], expected: list[Span]):
    llm = open_stored(**settings)
    refill(llm, PROMPT)
    assert spans(ask(llm, PROMPT)) == [*expected, (69, 70, "last", "")]


def test_diverged_from_what_is_stored(stored: LLM):
    output = ask(stored, [*PROMPT[:37], 300 - PROMPT[37] >> 1, *PROMPT[38:]])
    assert outcomes(output) == {"reused": 37, "diverged": 32, "last": 1}
    there = output.explain().divergence
    assert there is not None
    assert (there.position, list(there.cached)) == (37, PROMPT[37:48])


def test_evicted_from_the_store(stored: LLM, store: LateStore):
    empty(store)
    assert outcomes(ask(stored, PROMPT)) == {"evicted": 64, "tail": 5, "last": 1}


@pytest.mark.parametrize(
    ("can", "asked", "outcome"),
    [(False, {}, "expired"), (True, {"ttl": 60}, "expired"), (False, {"ttl": 60}, "evicted")],
)
def test_expired_by_the_time_of_the_store_or_that_its_request_asked_for(
    open_stored: Open, store: LateStore, caplog, can: bool, asked: dict[str, int], outcome: str
):
    store.capabilities = replace(store.capabilities, expires_each=can)
    llm = open_stored()
    explainer = llm._engine._explainer
    explainer._ttl_s = None if asked else 60.0
    for prompt in (PROMPT, [*OTHER[:32], 1]):
        refill(llm, prompt, cache=asked or None)
    now = explainer._clock()
    empty(store)
    assert ("cannot expire single blocks" in caplog.text) == (bool(asked) and not can)
    explainer._clock = lambda: now + 50.0
    assert spans(ask(llm, [*OTHER[:32], 1]))[0] == (0, 32, "evicted", "")
    explainer._clock = lambda: now + 171.0  # blocks may be recorded when the clock shows 50 more
    assert spans(ask(llm, PROMPT))[0] == (0, 64, outcome, "")


TIERS = "tiered:?tiers=memory:%3Fttl=2m,disk:/kv"


@pytest.mark.parametrize(
    ("url", "seconds"),
    [
        ("memory:?ttl=2m", 120.0),
        ("memory:", None),
        ("mine:?ttl=often", None),
        (TIERS, None),
        (f"{TIERS}%3Fttl=1h", 3600.0),
    ],
)
def test_the_time_of_blocks_is_that_of_the_url(url: str, seconds: float | None):
    assert store_ttl_s(KvCacheConnectorConfig(url=url)) == seconds


@pytest.mark.parametrize("computed_first", [70, 40])
def test_a_save_that_the_request_refused(open_stored: Open, computed_first: int):
    """Also behind what an earlier one had saved, which is reused."""
    llm = open_stored()
    if computed_first < 70:
        refill(llm, PROMPT[:computed_first])
    ask(llm, PROMPT, cache={"save": False})
    check_rest(llm)
    found = spans(ask(llm, PROMPT))
    lost = (0, 69) if computed_first == 70 else (40, 69)
    assert (*lost, "not_saved", "refused by the request") in found
    assert found[0][2] == ("not_saved" if computed_first == 70 else "reused")


def test_no_completion_of_the_request_is_saved(open_stored: Open, store: LateStore):
    llm = open_stored()
    several = SamplingParams(max_tokens=20, n=3, temperature=1.0, ignore_eos=True)
    ask(llm, PROMPT, several, cache={"save": False})
    check_rest(llm)
    assert not store.frames
    ask(llm, PROMPT, several)
    check_rest(llm)
    assert store.frames


def test_a_load_that_the_request_refused(stored: LLM):
    assert outcomes(ask(stored, PROMPT, cache={"load": False})) == {"not_loaded": 69, "last": 1}
    assert outcomes(ask(stored, PROMPT, cache={"load": False})) == {"reused": 69, "last": 1}


class Refusing(OffloadScheduler):
    """Saves no second block; loads nothing for one salt; breaks with another."""

    def may_load(self, request):
        return request.cache_salt != "no loads"

    def may_save(self, request, block):
        if request.cache_salt == "broken":
            raise RuntimeError("planted")
        return block.number < 1


def test_what_hooks_refuse(open_stored: Open):
    llm = open_stored(connector_module=__name__, connector_scheduler_class="Refusing")
    refill(llm, PROMPT)
    told = spans(ask(llm, PROMPT))
    assert told[:2] == [(0, T, "reused", ""), (T, 69, "not_saved", "refused by a hook")]
    refill(llm, PROMPT, cache_salt="broken")
    told = spans(ask(llm, PROMPT, cache_salt="broken"))
    assert told[0] == (0, 69, "not_saved", "hook failed")
    refill(llm, PROMPT, cache_salt="no loads")
    told = outcomes(ask(llm, PROMPT, cache_salt="no loads"))
    assert told == {"not_loaded": 69, "last": 1}


def test_a_save_that_failed(open_stored: Open, store: LateStore, monkeypatch):
    async def full(_blocks: object) -> int:
        return 0

    llm = open_stored()
    monkeypatch.setattr(store, "save", full)
    refill(llm, PROMPT)
    ask(llm, OTHER[:20])  # a step in which the worker reports it
    assert spans(ask(llm, PROMPT))[0] == (0, 69, "not_saved", "save failed")


def test_a_save_without_room(open_stored: Open, monkeypatch):
    llm = open_stored(save_timeout_s=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(SaveQueue, "stage", lambda *_, **__: 0)
        ask(llm, PROMPT)
        check_rest(llm)
    assert spans(ask(llm, PROMPT))[0] == (0, 69, "not_saved", "backlog")


def test_a_store_that_is_away(open_stored: Open):
    """While blocks are saved, and while they are looked up."""
    llm = open_stored()
    with away(llm):
        ask(llm, PROMPT)
    check_rest(llm)
    assert spans(ask(llm, PROMPT))[0] == (0, 69, "not_saved", "store unavailable")
    refill(llm, OTHER)
    with away(llm):
        assert outcomes(ask(llm, OTHER)) == {"failed": 159, "last": 1}


def test_late_lookup(stored: LLM, monkeypatch):
    finding = stored._engine._connector._scheduler._finding
    monkeypatch.setattr(type(finding.budget), "wait", lambda *_: None)
    monkeypatch.setattr(finding, "hit", lambda _request: None)
    assert outcomes(ask(stored, PROMPT)) == {"late": 69, "last": 1}


@pytest.mark.parametrize(
    ("fault", "outcome"), [("failing", "failed"), ("broken", "damaged"), ("lost", "evicted")]
)
def test_a_load_that_brings_nothing(stored: LLM, store: LateStore, fault: str, outcome: str):
    getattr(store, fault).update(store.frames)
    found = outcomes(ask(stored, PROMPT))
    assert found.pop("last") == 1
    assert found.pop(outcome) >= 64
    assert set(found) <= {"new", "tail"}


def test_a_load_that_is_slower(stored: LLM, monkeypatch):
    monkeypatch.setattr(stored._engine._connector._loads, "is_worth", lambda *_: False)
    assert outcomes(ask(stored, PROMPT)) == {"slower": 69, "last": 1}


def test_tokens_computed_beside_a_load(open_stored: Open, store: LateStore, monkeypatch):
    monkeypatch.setattr(BesideLoads, "is_worth", lambda *_: True)
    monkeypatch.setattr(
        BesideLoads,
        "chunk",
        lambda _, request, *__, **___: T if request.num_computed_tokens < 2 * T else 0,
    )
    llm = open_stored(overlap_loads=True)
    refill(llm, PROMPT)
    store.held.update(store.frames)
    handle = llm.submit(PROMPT, ONE)
    engine = llm._engine
    assert store.waits.wait(60)
    while not any(one.num_computed_tokens >= 2 * T for one in engine._scheduler.loading.values()):
        pass
    store.release()
    found = outcomes(handle.result(60))
    assert found["slower"] == 2 * T
    assert found["reused"] >= 2 * T


# ---------------------------------------------------------------------- sums and the ceiling


def test_the_ceiling_is_what_a_cache_without_limits_would_have_brought(open_llm: Open, llama: Path):
    """Compared with a set of all prefixes, within three standard errors of the distinct blocks."""
    llm = open_llm(llama, max_tokens=12 * T)  # real hits are rare
    rng = np.random.default_rng(4)
    bases = [words(100, seed) for seed in range(8)]
    seen: set[tuple[int, ...]] = set()
    total, before = 0, metrics.snapshot().get("engine.request.ceiling_tokens", 0)
    for number in range(120):
        base = bases[int(rng.integers(len(bases)))][: int(rng.integers(20, 100))]
        prompt = [*base, *words(5, 100 + number)]
        output = ask(llm, prompt)
        blocks = [tuple(prompt[:end]) for end in range(T, len(prompt) + 1, T)]
        known = sum(block in seen for block in blocks)
        total += T * known - (known * T == len(prompt))
        total += outcomes(output).get("reused", 0) % T
        seen.update(blocks)
    found = metrics.snapshot()["engine.request.ceiling_tokens"] - before
    assert abs(found - total) <= 3 * 0.013 * T * len(seen) + T
    assert found > 2 * llm.stats().reused_device_tokens


def test_generated_blocks_count_for_the_ceiling(llm: LLM):
    first = ask(llm, PROMPT, SamplingParams(max_tokens=30))
    before = metrics.snapshot()["engine.request.ceiling_tokens"]
    turn = ask(llm, [*PROMPT, *first.output_token_ids, *words(5, 7)])
    found = metrics.snapshot()["engine.request.ceiling_tokens"] - before
    assert outcomes(turn)["reused"] == 99
    assert found == pytest.approx(99, abs=1)


@pytest.mark.parametrize("count", [60, *slow(10_000)])
def test_sums_are_exact_over_a_random_run(count: int, open_llm: Open, llama: Path):
    """Prompts that share prefixes, in small caches, preempted and aborted now and then."""
    llm = open_llm(
        llama,
        max_tokens=16 * T,
        connector="memory:?capacity=1MiB",
        max_num_tokens=32,
        scheduling="max_utilization",
    )
    rng = np.random.default_rng(9)
    bases = [words(120, seed) for seed in range(6)]
    total, handles = 0, []
    for number in range(count):
        base = bases[int(rng.integers(len(bases)))]
        prompt = [*base[: int(rng.integers(1, 120))], *words(int(rng.integers(0, 30)), number)]
        salt = [None, "a", "b"][int(rng.integers(3))]
        params = SamplingParams(max_tokens=int(rng.integers(0, 12)))
        handles.append(llm.submit(prompt or [1], params, cache_salt=salt))
        if rng.random() < 0.1:
            handles[-1].abort()
        if len(handles) >= 12:
            total += sum(sum(outcomes(handle.result(600)).values()) for handle in handles)
            handles = []
    total += sum(sum(outcomes(handle.result(600)).values()) for handle in handles)
    assert total == llm.stats().prompt_tokens
