"""``verify="full"``: what was read counts once both sides' digests of it are equal."""

from __future__ import annotations

import pytest
from engines import (
    ANSWER,
    address_of,
    hand_over,
    hands_out,
    is_claimed,
    leaks_nothing,
    node_of,
    prompt_of,
    result_of,
    until,
)

from kvconnect.connector.disagg import node as node_module
from kvconnect.connector.disagg.fetch.fetcher import Fetcher
from kvconnect.errors import ConfigurationError
from kvconnect.transfer.control.messages import FoundDigest

FULL = {"verify": "full", "claim_timeout_s": 5.0}


@pytest.mark.parametrize("size", [16, 8, 32])
def test_what_is_equal_is_used(size, open_one, answer_of, counted):
    prefill, decode = open_one("prefill"), open_one("decode", transfer=FULL, tokens_per_block=size)
    prompt = prompt_of(100)
    assert hand_over(prefill, decode, prompt) == (answer_of(prompt), 99)
    assert counted["transfer.bad_digests"] == 0
    leaks_nothing(prefill, decode)


def test_what_a_prefill_writes_behind_the_prompt_is_no_difference(open_one, answer_of, counted):
    """It generates into the prompt's last block while that is read."""
    prefill, decode = open_one("prefill", max_num_tokens=48), open_one("decode", transfer=FULL)
    for number in range(3):
        prompt = prompt_of(100, number)
        here, there = hands_out(address_of(prefill), f"{number}")
        reading = decode.submit(prompt, ANSWER, kv_transfer_params=there)
        until(lambda: is_claimed(prefill))
        prefill.submit(prompt, ANSWER, kv_transfer_params=here)
        assert result_of(reading) == (answer_of(prompt), 99)
    assert counted["transfer.bad_digests"] == 0


def test_one_bit_that_differs_is_found(open_one, answer_of, counted, monkeypatch):
    """Of the first, a middle, and the last token that is read."""
    prefill, decode = open_one("prefill"), open_one("decode", transfer=FULL)
    layout = decode._engine._connector._worker._llm_args.layouts[0]
    width = layout.num_kv_heads * layout.key_dim
    done = Fetcher._pull_done

    def damaged(fetcher, fetch, pull, error, *landed):
        position = (0, 50, 98)[counted["transfer.bad_digests"]]
        (block, *_) = fetch.order.blocks[0][position // 16 :]
        # Keys of the first layer, [tokens, heads, dim]: the first element of that token.
        node_of(decode)._regions[0][block].reshape(-1)[position % 16 * width] += 1
        done(fetcher, fetch, pull, error, *landed)

    monkeypatch.setattr(Fetcher, "_pull_done", damaged)
    for number in range(3):
        prompt = prompt_of(100, number)
        assert hand_over(prefill, decode, prompt) == (answer_of(prompt), 0)
        assert counted["transfer.bad_digests"] == number + 1
    leaks_nothing(prefill, decode)


def test_a_prefill_that_makes_no_digests_is_not_believed(open_one, answer_of, monkeypatch):
    prefill, decode = open_one("prefill"), open_one("decode", transfer=FULL)
    prompt = prompt_of(100)
    monkeypatch.setattr(
        node_module.TransferNode, "_digest_of", lambda _, asked: FoundDigest(seq=asked.seq)
    )
    assert hand_over(prefill, decode, prompt) == (answer_of(prompt), 0)


def test_pools_that_are_too_large_for_it_are_an_error_at_the_start(open_one, monkeypatch):
    monkeypatch.setattr(node_module, "can_be_digested", lambda _: False)
    with pytest.raises(ConfigurationError, match="verify='full': pools on a device"):
        open_one("decode", transfer=FULL)
