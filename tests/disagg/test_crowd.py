"""Hostile peers in any number do not keep a decode from the prompts that a prefill computed."""

from __future__ import annotations

import itertools

import pytest
from crowd import Crowd
from engines import hand_over, leaks_nothing, node_of, prompt_of, until

from kvconnect.transfer import acceptor


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["idle", "again"])
def test_a_crowd_keeps_no_decode_out(again, open_one, answer_of):
    """Of peers that know the model, without a secret: each is let in."""
    prefill, decode = open_one("prefill"), open_one("decode")
    node, seeds = node_of(prefill), itertools.count()
    port, size = int(node.address.rpartition(":")[2]), acceptor._MAX_ADMITTED + 50

    def is_fetched() -> bool:
        prompt = prompt_of(100, next(seeds))
        tokens, reused = hand_over(prefill, decode, prompt)
        assert tokens == answer_of(prompt)
        return reused > 0

    with Crowd("channels", port, node.hello(), size, again=again) as crowd:
        until(lambda: crowd.opened() >= size)
        until(is_fetched, 30)
        for _ in range(5):
            assert is_fetched()
    leaks_nothing(prefill, decode)
