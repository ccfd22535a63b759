"""Blocks that a read which was given up may still write to: kept apart, and freed in the end."""

from __future__ import annotations

import threading

import pytest
from engines import (
    ANSWER,
    PREFILL,
    address_of,
    hand_over,
    hands_out,
    is_claimed,
    leaks_nothing,
    node_of,
    prompt_of,
    until,
)

from kvconnect.engine.engine import Engine
from kvconnect.errors import PullFailed
from kvconnect.transfer.pull import Pull

PROMPT = prompt_of(100)


class Stuck:
    """Pulls of `llm` fail, and may still write until its transport is built anew."""

    def __init__(self, llm, monkeypatch):
        self.pulls: list[Pull] = []
        self.rebuilding, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.transport = node_of(llm).transport
        self._pull, self._rebuild = self.transport.pull, self.transport.rebuild
        self.stuck = True
        monkeypatch.setattr(self.transport, "pull", self.pull)
        monkeypatch.setattr(self.transport, "rebuild", self.rebuild)

    def pull(self, peer, reads, *, deadline_s):
        if not self.stuck:
            return self._pull(peer, reads, deadline_s=deadline_s)
        pull = Pull(reads.total_nbytes)
        pull.fail(PullFailed("deadline", "planted"))
        self.pulls.append(pull)
        return pull

    def rebuild(self):
        self.rebuilding.set()
        assert self.go_on.wait(60)
        self._rebuild()
        self.let_go()

    def let_go(self):
        self.stuck = False
        for pull in self.pulls:
            pull.finish()


def fetched(prefill, decode, seed, answer_of):
    """What of a prompt is fetched; its answer is right in any case."""
    prompt = prompt_of(100, seed)
    tokens, reused = hand_over(prefill, decode, prompt)
    assert tokens == answer_of(prompt)
    return reused


def test_a_full_quarantine_ends_in_a_new_transport_and_fetching_goes_on(
    open_one, answer_of, monkeypatch, counted
):
    monkeypatch.setattr("kvconnect.transfer.quarantine._GRACE_S", 0.0)
    prefill, decode = open_one("prefill"), open_one("decode", max_tokens=2048)
    stuck = Stuck(decode, monkeypatch)
    stuck.go_on.clear()
    # The runtime would stop all loads at the same bound: here it is to be the transfer's own.
    decode._engine._connector._ledger.quarantine._max_blocks = 1 << 20
    number = 0
    while not stuck.rebuilding.is_set():
        assert fetched(prefill, decode, number, answer_of) == 0
        number += 1
        assert number < 10 or stuck.rebuilding.wait(60)
    before, pulls = node_of(decode).transport.local(), len(stuck.pulls)
    assert counted["transfer.quarantined.blocks"] >= 12  # a tenth of the pool
    # Nothing is read from there meanwhile, and what may be written to is used by nobody.
    assert fetched(prefill, decode, 20, answer_of) == 0
    assert len(stuck.pulls) == pulls
    assert decode.stats().free_blocks <= decode.stats().max_blocks - 12
    stuck.go_on.set()
    leaks_nothing(decode)
    until(lambda: node_of(decode).transport.local() != before)
    assert counted["transfer.rebuilds"] == 1
    # A fetch that began with the rebuild may have lost its connection to it.
    assert 99 in [fetched(prefill, decode, number, answer_of) for number in (30, 31)]
    leaks_nothing(prefill, decode)


def test_a_prefill_whose_transport_is_built_anew_is_read_from_again(open_one, answer_of):
    prefill, decode = open_one("both"), open_one("decode")
    assert fetched(prefill, decode, 0, answer_of) == 99
    link = next(iter(node_of(decode).peers._links.values()))
    before = link.handle
    node_of(prefill).rebuild()
    until(lambda: link.handle is None)
    assert fetched(prefill, decode, 1, answer_of) == 99
    (link,) = node_of(decode).peers._links.values()
    assert link.handle.incarnation != before.incarnation
    leaks_nothing(prefill, decode)


@pytest.mark.parametrize("writes_end", [True, False])
def test_the_reader_is_preempted_while_it_loads(
    writes_end, open_one, answer_of, stop_at, monkeypatch
):
    prefill, decode = open_one("prefill", max_num_tokens=48), open_one("decode")
    stuck = Stuck(decode, monkeypatch)
    stuck.stuck = not writes_end
    gate = stop_at(2 if writes_end else 5)
    here, there = hands_out(address_of(prefill), "preempted")
    reading = decode.submit(PROMPT, ANSWER, kv_transfer_params=there)
    until(lambda: is_claimed(prefill))
    loading, step = decode._engine._scheduler.loading, Engine.step
    preempted = threading.Event()

    def preempting(engine):
        if engine is decode._engine and loading and not preempted.is_set():
            fetcher = node_of(decode).fetcher
            if writes_end or stuck.pulls:
                until(lambda: fetcher._fetches or stuck.pulls)
                engine._send_back(next(iter(loading.values())))
                preempted.set()
        return step(engine)

    if not writes_end:  # the failure of its pull is not heard of before
        monkeypatch.setattr(node_of(decode).fetcher, "_pull_done", lambda *_: None)
    monkeypatch.setattr(Engine, "step", preempting)
    computing = prefill.submit(PROMPT, PREFILL, kv_transfer_params=here)
    assert gate.reached.wait(60)
    until(lambda: writes_end or stuck.pulls)
    node_of(decode)._wake()
    output = reading.result(60)
    assert output.preemptions == 1
    assert list(output.output_token_ids) == answer_of(PROMPT)
    assert output.reused_store_tokens == 0
    if not writes_end:
        assert decode.stats().free_blocks <= decode.stats().max_blocks - 7
        stuck.let_go()
    leaks_nothing(decode)
    gate.open()
    computing.result(60)
    leaks_nothing(prefill)
    fetcher = node_of(decode).fetcher
    assert not fetcher._fetches
    assert not fetcher.claims
    assert not len(node_of(decode).client)
