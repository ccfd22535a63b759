"""A decode does not wait for a prefill that is slow, frozen or dead: it computes meanwhile."""

from __future__ import annotations

import random
import signal

import pytest
from engines import (
    ANSWER,
    PREFILL,
    T,
    address_of,
    hand_over,
    hands_out,
    leaks_nothing,
    node_of,
    prompt_of,
    until,
)

from kvconnect import LLM
from kvconnect.engine.beside_loads import BesideLoads
from kvconnect.request import LlmRequest

OVERLAPS = {"transfer": {"overlap_fetches": True}}
PATIENT = {"transfer": {"lease_s": 100.0}}
PROMPT = prompt_of(20 * T + 5)
LAST = len(PROMPT) - 1


@pytest.fixture
def computes_nothing(monkeypatch):
    """Decodes wait for what they fetch."""
    monkeypatch.setattr(BesideLoads, "chunk", lambda *_, **__: 0)


def keeps_nothing(decode: LLM) -> None:
    """No block of `decode` is held, and no memory for reads."""
    leaks_nothing(decode)
    landing = node_of(decode)._landing
    until(lambda: landing.num_free == 16)


def heads_of(decode: LLM) -> list[int]:
    """Up to where what `decode` fetches has come."""
    return [*node_of(decode).fetcher.beside.heads.values()]


# ---------------------------------------------------------------------- a prompt that is computed


def test_a_finished_prompt_is_loaded(open_one, answer_of, computes_nothing):
    prefill, decode = open_one("prefill"), open_one("decode", **OVERLAPS)
    for length in (2, T, 5 * T, 5 * T + 1, 20 * T + 5):
        prompt = prompt_of(length)
        assert hand_over(prefill, decode, prompt) == (answer_of(prompt), length - 1)
    leaks_nothing(prefill)
    keeps_nothing(decode)


def test_a_finished_prompt_is_loaded_from_its_end(open_one, answer_of, monkeypatch):
    """And computed from its beginning: the two meet."""
    met = []

    def a_block(beside: BesideLoads, request: LlmRequest, *_: object, **__: object) -> int:
        beside._look_after(0.001)
        if not T < request.loaded_from < LAST:
            return 0  # the first answer comes from the end; before all is there
        met.append(request.loaded_from)
        return T - request.num_computed_tokens if request.num_computed_tokens < T else 0

    monkeypatch.setattr(BesideLoads, "chunk", a_block)
    monkeypatch.setattr("kvconnect.connector.disagg.fetch.part._PULLS_IN_FLIGHT", 1)
    prefill, decode = open_one("prefill"), open_one("decode", **OVERLAPS)
    tokens, reused = hand_over(prefill, decode, PROMPT)
    assert tokens == answer_of(PROMPT)
    assert not met or reused == LAST - T
    keeps_nothing(decode)


# ---------------------------------------------------------------------- one that is being computed


def test_what_a_slow_prefill_has_computed_counts(open_one, answer_of, stop_at):
    """The decode goes on from there, long before the prefill does."""
    prefill, decode = open_one("prefill", max_num_tokens=48), open_one("decode", **OVERLAPS)
    here, there = hands_out(address_of(prefill), "slow")
    gate = stop_at(8)
    computing = prefill.submit(PROMPT, PREFILL, kv_transfer_params=here)
    assert gate.reached.wait(60)
    reading = decode.submit(PROMPT, ANSWER, kv_transfer_params=there)
    assert list(reading.result(60).output_token_ids) == answer_of(PROMPT)
    gate.open()
    computing.result(60)
    leaks_nothing(prefill)
    keeps_nothing(decode)


@pytest.mark.parametrize("ends", ["goes on", "aborted"])
def test_what_is_certain_counts_whatever_follows(ends, open_one, answer_of, stop_at, monkeypatch):
    """Three blocks were read and confirmed; then the prefill goes on, or gives up its blocks."""
    opened = []

    def after_the_head(beside: BesideLoads, request: LlmRequest, *_: object, **__: object) -> int:
        beside._look_after(0.001)
        if request.num_computed_tokens == 3 * T and not opened:
            opened.append(True)
            if ends == "aborted":
                computing.abort()
            gate.open()
        return 0

    monkeypatch.setattr(BesideLoads, "chunk", after_the_head)
    prefill, decode = open_one("prefill", max_num_tokens=48), open_one("decode", **OVERLAPS)
    here, there = hands_out(address_of(prefill), "certain")
    gate = stop_at(5)
    computing = prefill.submit(PROMPT, PREFILL, kv_transfer_params=here)
    output = decode.submit(PROMPT, ANSWER, kv_transfer_params=there).result(60)
    assert list(output.output_token_ids) == answer_of(PROMPT)
    assert opened
    assert output.reused_store_tokens >= 3 * T
    if ends == "goes on":
        assert output.reused_store_tokens == LAST
    computing.result(60)
    leaks_nothing(prefill)
    keeps_nothing(decode)


# ---------------------------------------------------------------------- real processes


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 8))]
)
def test_a_frozen_prefill_costs_what_computing_costs(seed, start_one, open_one, answer_of):
    """Frozen at any time, also before it has said anything; no deadline ends the wait for it."""
    dice = random.Random(seed)
    process = start_one("prefill", max_num_tokens=48, **PATIENT)
    decode = open_one("decode", **OVERLAPS)
    for number in range(3):
        prompt = prompt_of(dice.randint(60, 20 * T), seed=10 * seed + number)
        here, there = hands_out(process.address, f"frozen {number}")
        if early := dice.random() < 0.3:
            process.signal(signal.SIGSTOP)
        else:
            process.ask("submit", prompt, PREFILL, here)
        reading = decode.submit(prompt, ANSWER, kv_transfer_params=there)
        until(lambda reading=reading: node_of(decode).fetcher._fetches or reading.done)
        if not early:
            if dice.random() < 0.5:  # once something has come
                until(lambda reading=reading: any(heads_of(decode)) or reading.done)
            process.signal(signal.SIGSTOP)
        assert list(reading.result(60).output_token_ids) == answer_of(prompt)
        process.signal(signal.SIGCONT)
        if early:
            process.ask("submit", prompt, PREFILL, here)
        process.ask("result")
    keeps_nothing(decode)
    process.end_well()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 8))]
)
def test_a_killed_prefill_costs_what_computing_costs(seed, start_one, open_one, answer_of):
    dice = random.Random(seed)
    process = start_one("prefill", max_num_tokens=48, **PATIENT)
    decode = open_one("decode", **OVERLAPS)
    here, there = hands_out(process.address, "killed")
    if dice.random() < 0.7:
        process.ask("stop_at", dice.randint(1, 40))
    process.ask("submit", PROMPT, PREFILL, here)
    reading = decode.submit(PROMPT, ANSWER, kv_transfer_params=there)
    until(lambda: node_of(decode).fetcher._fetches or not decode.stats().loading_requests)
    process.end()
    assert list(reading.result(60).output_token_ids) == answer_of(PROMPT)
    keeps_nothing(decode)
