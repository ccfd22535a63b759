"""Faults by dice at every call and message between two engines: answers stay right, nothing stays.

What is planted: messages that are lost (the channel ends, as TCP would have it) or late, channels
that end, errors raised by the transport and in callbacks, reads that fail, that are late, or that
may write on after they failed; aborts; names used again.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter

import pytest
from engines import (
    ANSWER,
    PREFILL,
    address_of,
    hands_out,
    held_by,
    leaks_nothing,
    node_of,
    open_engine,
    prompt_of,
    until,
)
from own_process import own_process

from kvconnect.connector.disagg.fetch.fetcher import Fetcher
from kvconnect.connector.disagg.fetch.load import Part
from kvconnect.errors import PullFailed
from kvconnect.testing.processes.usage import descriptors
from kvconnect.transfer.claims import LeaseClient
from kvconnect.transfer.control.channel import Channel
from kvconnect.transfer.leases.server import LeaseServer
from kvconnect.transfer.pull import Pull
from kvconnect.transfer.quarantine import Quarantine


class Dice:
    """Plants faults while it is `on`, by a seed; everything it delays it does in the end."""

    def __init__(self, seed: int, monkeypatch) -> None:
        self.on = False
        self.done: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._late: list[tuple[float, object]] = []
        self._changed = threading.Condition()
        self._ended = False
        for cls, name, odds in (
            (Part, "advance", 0.004),
            (Part, "_learn", 0.005),
            (Part, "pull_done", 0.02),
            (Quarantine, "hold", 0.2),
            (Part, "__init__", 0.03),
            (Fetcher, "_start", 0.03),
            (LeaseClient, "handle", 0.02),
            (LeaseServer, "handle", 0.02),
        ):
            self._raising(monkeypatch, cls, name, odds)
        send, dice = Channel.send, self

        def sending(channel, message):
            if dice.strikes("lost", 0.01):
                channel.close("planted: it is lost, and with it the connection")
                return False
            return send(channel, message)

        monkeypatch.setattr(Channel, "send", sending)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def strikes(self, what: str, odds: float) -> bool:
        with self._lock:
            if not self.on or self._rng.random() >= odds:
                return False
            self.done[what] += 1
            return True

    def _raising(self, monkeypatch, cls, name, odds):
        method, dice = getattr(cls, name), self

        def planted(*args, **more):
            if dice.strikes(f"{cls.__name__}.{name}", odds):
                raise ValueError(f"planted in {name}")
            return method(*args, **more)

        monkeypatch.setattr(cls, name, planted)

    def over(self, transport, monkeypatch) -> None:
        """Pulls of `transport` fail, are late, or write on."""
        pull, dice = transport.pull, self

        def pulling(peer, reads, *, deadline_s):
            if dice.strikes("raised", 0.02):
                raise PullFailed("peer", "planted")
            if dice.strikes("failed", 0.03):
                failed = Pull(reads.total_nbytes)
                failed.finish(PullFailed("peer", "planted"))
                return failed
            if dice.strikes("writes on", 0.03):
                return dice._writes_on(pull(peer, reads, deadline_s=deadline_s))
            if dice.strikes("late", 0.1):
                return dice._late_pull(pull(peer, reads, deadline_s=deadline_s))
            return pull(peer, reads, deadline_s=deadline_s)

        monkeypatch.setattr(transport, "pull", pulling)

    def _writes_on(self, real: Pull) -> Pull:
        seen = Pull(real.nbytes)
        seen.fail(PullFailed("deadline", "planted"))
        real.terminal.add_callback(lambda: self._later(seen.finish))
        return seen

    def _late_pull(self, real: Pull) -> Pull:
        seen = Pull(real.nbytes)
        real.done.add_done_callback(lambda done: self._later(lambda: seen.finish(done.exception())))
        return seen

    def _later(self, call) -> None:
        with self._lock:
            at = time.monotonic() + self._rng.random() * 0.1
        with self._changed:
            self._late.append((at, call))
            self._changed.notify()

    def _run(self) -> None:
        while not self._ended:
            with self._changed:
                self._changed.wait(0.005 if self._late else None)
                due = [one for one in self._late if one[0] <= time.monotonic()]
                self._late = [one for one in self._late if one not in due]
            for _, call in due:
                call()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()


@pytest.fixture
def dice_of(monkeypatch):
    made: list[Dice] = []

    def make(seed):
        made.append(Dice(seed, monkeypatch))
        return made[-1]

    yield make
    for one in made:
        one.on = False
        one.end()


def run(prefill, decode, rng, count, *, at_once=8):
    """So many prompts, some aborted, some names used again; returns them with both results."""
    address, open_ones, answers = address_of(prefill), [], []
    for number in range(count):
        name = f"dice {number - 1 if number and rng.random() < 0.1 else number}"
        prompt = prompt_of(rng.choice([2, 16, 17, 33, 64, 90, 100]), rng.randrange(6))
        here, there = hands_out(address, name)
        if rng.random() < 0.1:
            there["address"] = address.replace("127.0.0.1", "localhost")
        sides = [(prefill, PREFILL, here), (decode, ANSWER, there)]
        rng.shuffle(sides)
        pair = {llm: llm.submit(prompt, how, kv_transfer_params=it) for llm, how, it in sides}
        if rng.random() < 0.15:
            rng.choice([pair[prefill], pair[decode]]).abort()
        open_ones.append((prompt, pair))
        if len(open_ones) >= at_once:
            prompt, pair = open_ones.pop(0)
            answers.append((prompt, pair[decode].result(60), pair[prefill].result(60)))
    answers += [
        (prompt, pair[decode].result(60), pair[prefill].result(60)) for prompt, pair in open_ones
    ]
    return answers


def nothing_is_left(prefill, decode):
    """Of any request, on both sides, in the books of leaders, workers and threads."""
    leaks_nothing(decode, prefill)
    until(lambda: not held_by(prefill) and not held_by(decode))


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 30))]
)
def test_faults_by_dice_cost_time_and_nothing_else(seed, open_one, answer_of, dice_of, monkeypatch):
    short = {"lease_s": 1.0, "claim_timeout_s": 1.0}
    prefill = open_one("prefill", max_num_tokens=48, transfer=short)
    decode = open_one("decode", transfer=short)
    dice = dice_of(seed)
    dice.over(node_of(decode).transport, monkeypatch)
    dice.on = True
    answers = run(prefill, decode, random.Random(seed), 20 if seed == 1 else 60)
    dice.on = False
    for prompt, output, _ in answers:
        if output.finish_reason != "abort":
            assert list(output.output_token_ids) == answer_of(prompt)
    assert dice.done
    prefill.generate([prompt_of(20)], PREFILL)
    nothing_is_left(prefill, decode)
    until(lambda: sound(prefill, decode))


def sound(prefill, decode) -> bool:
    """Whether a prompt is fetched again."""
    prompt = [*prompt_of(80, 99), *np_tokens()]
    (first,) = prefill.generate([prompt], PREFILL, kv_transfer_params={"do": "prefill"})
    (output,) = decode.generate([prompt], ANSWER, kv_transfer_params=first.kv_transfer_params)
    return output.reused_store_tokens > 0


def np_tokens() -> list[int]:
    return [random.randrange(1, 250) for _ in range(20)]


@pytest.mark.slow
@own_process
def test_two_thousand_requests_leave_nothing(llama, transport):
    settings = {"transport": transport, "lease_s": 1.0}
    with (
        open_engine(llama, None) as alone,
        open_engine(llama, "prefill", max_num_tokens=64, transfer=settings) as prefill,
        open_engine(llama, "decode", transfer={"transport": transport}) as decode,
    ):
        rng = random.Random(2000)
        run(prefill, decode, rng, 200)
        nothing_is_left(prefill, decode)
        before = _inventory()
        for _ in range(9):
            answers = run(prefill, decode, rng, 200)
            for prompt, output, _ in answers[::10]:
                if output.finish_reason != "abort":
                    assert (
                        output.output_token_ids
                        == alone.generate([prompt], ANSWER)[0].output_token_ids
                    )
            nothing_is_left(prefill, decode)
        after = _inventory()
    assert after["threads"] <= before["threads"] + 4
    assert after["files"] <= before["files"] + 8
    for name in ("Claim", "Claimed", "Load", "Part", "TcpPull", "LlmRequest", "Lease", "Channel"):
        assert after[name] <= before[name] + 8, (name, before[name], after[name])


def _inventory() -> Counter[str]:
    gc.collect()
    found = Counter(type(one).__name__.removeprefix("_") for one in gc.get_objects())
    found["threads"] = threading.active_count()
    found["files"] = descriptors()
    return found
