"""A prompt that waits for its reader is digested, and read with these digests over TCP."""

from __future__ import annotations

import pytest
from engines import ANSWER, PREFILL, T, leaks_nothing, node_of, prompt_of, until

from kvconnect.transfer.tcp.stream import Stream


@pytest.fixture
def transport():
    return "tcp"


@pytest.fixture
def pair(open_one):
    return open_one("prefill"), open_one("decode")


@pytest.fixture
def sent(monkeypatch):
    """The bytes that went out with a digest of before."""
    calls = []
    plain = Stream.send_digested

    def send_digested(self, region, runs):
        calls.append(int(runs["nbytes"].sum()))
        plain(self, region, runs)

    monkeypatch.setattr(Stream, "send_digested", send_digested)
    return calls


PROMPT = prompt_of(3 * T + 9)


def published(prefill):
    """Computes the prompt, and returns what a reader of it needs once it is digested."""
    (first,) = prefill.generate([PROMPT], PREFILL, kv_transfer_params={"do": "prefill"})
    kept = node_of(prefill).transport._kept
    until(lambda: kept._live)
    with kept._lock:  # what begins to live is to be digested
        pass
    kept._worker.submit(int).result(60)
    return first.kv_transfer_params


def test_whole_blocks_are_read_with_their_digests_and_the_last_one_without(pair, open_one, sent):
    prefill, decode = pair
    (alone,) = open_one(None).generate([PROMPT], ANSWER)
    (output,) = decode.generate([PROMPT], ANSWER, kv_transfer_params=published(prefill))
    assert output.reused_store_tokens == len(PROMPT) - 1
    assert output.output_token_ids == alone.output_token_ids
    (region,) = node_of(prefill)._regions.values()
    assert sum(sent) == 3 * region[0].nbytes
    leaks_nothing(prefill, decode)
    assert not node_of(prefill).transport._kept._live


def test_blocks_that_are_written_while_a_lease_keeps_them_are_computed_instead(
    pair, open_one, sent
):
    prefill, decode = pair
    (alone,) = open_one(None).generate([PROMPT], ANSWER)
    there = published(prefill)
    (region,) = node_of(prefill)._regions.values()
    region.mul_(2)
    (output,) = decode.generate([PROMPT], ANSWER, kv_transfer_params=there)
    assert sent
    assert output.reused_store_tokens == 0
    assert output.output_token_ids == alone.output_token_ids
