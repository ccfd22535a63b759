"""One bit of what two engines' processes send each other is changed: no other token comes of it."""

from __future__ import annotations

import random
import re

import pytest
from engines import ANSWER, PREFILL, leaks_nothing, prompt_of
from tampering import TO_CLIENT, TO_SERVER, FlippedBit, Relay, Tampering, flip

from kvconnect.connector.disagg.fetch.fetcher import Fetcher

BETWEEN = "127.0.0.2"
"""Where the reader believes the other engine to be."""


ANSWER_HEAD = 40
"""Bytes before those of the blocks."""


def as_it_is(_, __, data):
    return [data]


class Between:
    """Relays of the control channel and of the blocks of a prefill engine.

    Attributes:
        control: changes frames of the control channel; numbers begin when it is set.
        data: the relay of the blocks; ``None`` until a reader has been told where they are.
    """

    def __init__(self, port: int) -> None:
        self.data: Relay | None = None
        self.control = as_it_is
        self.numbers = {TO_SERVER: 0, TO_CLIENT: 0}
        self._relay = Relay(port, self._frame, host=BETWEEN, listen=port)

    def close(self) -> None:
        self._relay.close()
        if self.data is not None:
            self.data.close()

    def tamper(self, how: str, way: str, number: int, seed: int) -> Tampering:
        """Changes a frame from now on."""
        self.numbers = {TO_SERVER: 0, TO_CLIENT: 0}
        self.control = Tampering(how, way, number, seed)
        return self.control

    def _frame(self, way: str, _: int, frame: bytes) -> list[bytes]:
        said = re.search(rb'"port":(\d+)', frame)
        if said and self.data is None and way == TO_CLIENT:
            port = int(said[1])
            self.data = Relay(port, framed=False, host=BETWEEN, listen=port)
        number = self.numbers[way]
        self.numbers[way] += 1
        return self.control(way, number, frame)


@pytest.fixture
def pair(llama, start_one, open_one):
    """A prefill engine in another process, a decode engine here, and what is between them."""
    shared = {"secret": "correct horse battery staple", "lease_s": 2.0, "claim_timeout_s": 1.0}
    prefill = start_one("prefill", transfer=shared | {"advertise": f"{BETWEEN}:0"})
    decode = open_one("decode", transfer=shared)
    between = Between(prefill.port)
    yield prefill, decode, between
    between.close()


@pytest.fixture
def transport():
    return "tcp"


def handed_over(prefill, decode, prompt):
    """What the decode answers, and how many tokens of the prefill it used."""
    prefill.ask("submit", prompt, PREFILL, {"do": "prefill"})
    _, _, carried = prefill.ask("result")
    assert carried["address"].startswith(BETWEEN)
    (output,) = decode.generate([prompt], ANSWER, kv_transfer_params=carried)
    return list(output.output_token_ids), output.reused_store_tokens


@pytest.mark.planted("bit-in-data", "transfer", "refused")
def test_no_changed_bit_of_a_block_is_used(pair, answer_of, counted):
    prefill, decode, between = pair
    rng = random.Random(11)
    prompt = prompt_of(100, 0)
    assert handed_over(prefill, decode, prompt) == (answer_of(prompt), 99)
    nbytes = counted["transfer.pull.bytes"]
    for seed in range(1, 4):
        prompt = prompt_of(100, seed)
        bit = rng.randrange(8 * ANSWER_HEAD, 8 * (ANSWER_HEAD + nbytes))
        between.data.change = FlippedBit(TO_CLIENT, bit)
        tokens, reused = handed_over(prefill, decode, prompt)
        assert (tokens, reused) == (answer_of(prompt), 0), seed
        assert counted["transfer.pull.corrupt"] == seed
    leaks_nothing(decode)


def test_no_changed_message_changes_an_answer(pair, answer_of):
    """Claim, grant and what follows, one after the other; a message that is missing, too."""
    prefill, decode, between = pair
    handed_over(prefill, decode, prompt_of(60, 0))
    cases = [("flip", way, number) for way in between.numbers for number in range(2)]
    cases += [("drop", way, 0) for way in between.numbers]
    done = 0
    for case, (how, way, number) in enumerate(cases):
        prompt = prompt_of(60, case + 1)
        change = between.tamper(how, way, number, case)
        tokens, _ = handed_over(prefill, decode, prompt)
        assert tokens == answer_of(prompt), (how, way, number)
        done += change.done.is_set()
    assert done >= len(cases) // 2
    leaks_nothing(decode)


class OtherBlock:
    """A grant names another block than it did.

    Attributes:
        done: it was changed.
    """

    def __init__(self, block: int) -> None:
        self.done = False
        self._block = block

    def __call__(self, way, _, frame):
        ids = re.search(rb"blocks\x91\xc4.", frame, re.DOTALL)
        if self.done or way != TO_CLIENT or ids is None:
            return [frame]
        self.done = True
        return [flip(frame, 8 * (ids.end() + 4 * self._block))]


@pytest.mark.planted("bit-in-block-id", "transfer", "equal")
def test_no_changed_id_of_a_block_changes_an_answer(pair, answer_of):
    prefill, decode, between = pair
    handed_over(prefill, decode, prompt_of(100, 0))
    for block in (0, 5):
        prompt = prompt_of(100, block + 1)
        between.control = change = OtherBlock(block)
        assert handed_over(prefill, decode, prompt)[0] == answer_of(prompt), block
        assert change.done
    leaks_nothing(decode)


def test_reads_are_under_the_epoch_of_their_lease(open_one, monkeypatch):
    """Which the checksums cover."""
    prefill, decode = open_one("prefill"), open_one("decode")
    start, epochs = Fetcher._start, set()

    def noting(fetcher, link, reads, deadline_s):
        (claimed,) = fetcher.claims.client._claimed.values()
        epochs.add((reads.epoch, claimed.lease.epoch))
        return start(fetcher, link, reads, deadline_s)

    monkeypatch.setattr(Fetcher, "_start", noting)
    prompt = prompt_of(60)
    (first,) = prefill.generate([prompt], PREFILL, kv_transfer_params={"do": "prefill"})
    decode.generate([prompt], ANSWER, kv_transfer_params=first.kv_transfer_params)
    ((read, leased),) = epochs
    assert read == leased
    assert read > 0
