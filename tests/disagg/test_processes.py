"""Engines in processes of their own that die, freeze and start again."""

from __future__ import annotations

import itertools
import signal
import time

import pytest
from engines import (
    ANSWER,
    PREFILL,
    address_of,
    hands_out,
    leaks_nothing,
    nbytes_read,
    node_of,
    prompt_of,
    result_of,
    until,
)

PROMPT = prompt_of(100)
QUICK = {"transfer": {"lease_s": 1.0}}


@pytest.fixture
def decode(open_one):
    return open_one("decode")


def read(process, decode, *, stop_at, transfer_id):
    """A prompt that `process` computes up to a layer, and that `decode` reads meanwhile."""
    here, there = hands_out(process.address, transfer_id)
    process.ask("stop_at", stop_at)
    handle = decode.submit(PROMPT, ANSWER, kv_transfer_params=there)
    until(lambda: process.ask("held").get("waiting claims"))
    process.ask("submit", PROMPT, PREFILL, here)
    assert process.ask("wait_stopped")
    until(lambda: node_of(decode).fetcher._fetches)
    return handle


def test_the_prefill_is_killed_and_starts_again(start_one, decode, answer_of):
    process = start_one("prefill", max_num_tokens=48, **QUICK)
    process.ask("submit", PROMPT[:50], PREFILL, {"do": "prefill"})
    _, _, carried = process.ask("result")
    (output,) = decode.generate([PROMPT[:50]], ANSWER, kv_transfer_params=carried)
    assert list(output.output_token_ids) == answer_of(PROMPT[:50])
    assert output.reused_store_tokens == 49

    handle = read(process, decode, stop_at=5, transfer_id="killed")
    until(lambda: nbytes_read(decode) > 0)
    process.end()
    killed = time.monotonic()
    output = handle.result(60)
    assert list(output.output_token_ids) == answer_of(PROMPT)
    assert (output.reused_device_tokens, output.reused_store_tokens) == (3 * 16, 0)
    assert time.monotonic() - killed < 60
    leaks_nothing(decode)

    again = start_one("prefill", transfer={"listen": process.address})
    assert again.address == process.address
    seeds = itertools.count(1)

    def fetched() -> bool:
        """Once the decode has tried the address again, which it does after ever longer pauses."""
        prompt = prompt_of(80, seed=next(seeds))
        again.ask("submit", prompt, PREFILL, {"do": "prefill"})
        _, _, carried = again.ask("result")
        (output,) = decode.generate([prompt], ANSWER, kv_transfer_params=carried)
        assert list(output.output_token_ids) == answer_of(prompt)
        return output.reused_store_tokens == 79

    until(fetched)
    leaks_nothing(decode)
    again.end_well()


def test_the_prefill_freezes_and_wakes(start_one, decode, answer_of):
    process = start_one("prefill", max_num_tokens=48, **QUICK)
    handle = read(process, decode, stop_at=5, transfer_id="frozen")
    process.signal(signal.SIGSTOP)
    frozen = time.monotonic()
    assert result_of(handle) == (answer_of(PROMPT), 0)
    assert time.monotonic() - frozen < 60
    if node_of(decode).config.transport == "tcp":  # with NIXL a read that has begun goes on
        leaks_nothing(decode)
    process.signal(signal.SIGCONT)
    leaks_nothing(decode)
    process.ask("go_on")
    process.ask("result")
    until(lambda: process.ask("stats").free_blocks == process.ask("stats").max_blocks)
    process.end_well()


def test_the_reader_is_killed_while_it_reads(start_one, open_one, stop_at):
    prefill = open_one("prefill", max_num_tokens=48, **QUICK)
    process = start_one("decode")
    here, there = hands_out(address_of(prefill), "killed")
    gate = stop_at(5)
    process.ask("submit", PROMPT, ANSWER, there)
    computing = prefill.submit(PROMPT, PREFILL, kv_transfer_params=here)
    assert gate.reached.wait(60)
    until(lambda: node_of(prefill).offers.server.table._live)
    process.end()
    gate.open()
    computing.result(60)
    ended = time.monotonic()
    leaks_nothing(prefill)
    assert time.monotonic() - ended < 60
