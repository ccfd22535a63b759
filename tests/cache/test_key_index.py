"""A key is hashed once, whether it is asked for first by the chain of a request or by the tree."""

from functools import partial

import pytest
import torch
from small_prompts import chain_of

from kvconnect import KvCacheConfig, keys
from kvconnect.cache.admission.prompt import Prompt
from kvconnect.cache.block_manager import BlockManager
from kvconnect.cache.tree import key_index
from kvconnect.keys import BlockKey, chain_keys, split_keys
from kvconnect.layout import KvCacheLayout

T = 4
PROMPT = list(range(10 * T))


@pytest.fixture
def hashed(monkeypatch):
    """All keys that were hashed, in order; equal ones as often as they were."""
    found = []

    def counting(*args):
        some = chain_keys(*args)
        found.extend(split_keys(some))
        return some

    monkeypatch.setattr(keys, "chain_keys", counting)
    monkeypatch.setattr(key_index, "chain_keys", counting)
    return found


def make(**config):
    layout = KvCacheLayout(1, 1, 1, 1, T, torch.float32)
    return BlockManager(KvCacheConfig(tokens_per_block=T, **config), layout, num_blocks=64)


chain = partial(chain_of, size=T)


def serve(manager, number, tokens, chain):
    manager.add_sequence(number, tokens, keys=chain)
    manager.commit(number, len(tokens))
    manager.release(number)


def pinned(manager, keys):
    handle = manager.pin_keys(keys)
    manager.unpin(handle)
    return len(handle.block_ids)


def asked_by_key(**config):
    manager = make(**config)
    pinned(manager, [])
    return manager


def test_without_a_question_nothing_is_hashed(hashed):
    manager = make()
    for number, tokens in enumerate([PROMPT, PROMPT, PROMPT[: 5 * T] + PROMPT]):
        serve(manager, number, tokens, chain(tokens))
    assert hashed == []


def test_the_tree_takes_what_the_chain_hashed(hashed):
    manager = asked_by_key(event_buffer_max_size=99)
    own = chain(PROMPT)
    names = own.keys()
    serve(manager, 0, PROMPT, own)
    assert pinned(manager, names) == len(hashed) == 10


def test_blocks_that_follow_one_by_one_are_taken_too(hashed):
    manager = asked_by_key()
    own = chain(PROMPT)
    names = own.keys()
    manager.add_sequence(0, PROMPT[:T], keys=own)
    for end in range(T, len(PROMPT), T):
        manager.commit(0, end)
        manager.append_tokens(0, PROMPT[end : end + T])
    manager.commit(0, len(PROMPT))
    assert pinned(manager, names) == len(hashed) == 10


@pytest.mark.parametrize("ask", ["predict_match", "add_sequence"])
def test_the_chain_takes_what_the_tree_hashed(hashed, ask):
    manager = asked_by_key()
    serve(manager, 0, PROMPT, chain(PROMPT))
    assert len(hashed) == 1, "of the segment, to find it"
    tokens = [*PROMPT[: 7 * T], 99, 98, 97, 96]
    own = chain(tokens)
    if ask == "predict_match":
        manager.predict_match(Prompt.of(tokens), own)
        assert own.num_hashed == len(hashed) == 7
    manager.add_sequence(1, tokens, keys=own)
    assert own.num_hashed == 7
    assert len(own.keys()) == 8
    manager.commit(1, 8 * T)
    assert len(hashed) == len(set(hashed)) == 9, "with the rest of the segment, to find that"
    assert pinned(manager, own.keys()) == 8
    assert own.keys()[:7] == chain(PROMPT).keys()[:7]


def test_parts_of_a_divided_run_keep_their_keys(hashed):
    manager = asked_by_key()
    own = chain(PROMPT)
    names = own.keys()
    serve(manager, 0, PROMPT, own)
    other = [*PROMPT[: 3 * T], *PROMPT]
    serve(manager, 1, other, chain(other))
    again = hashed[10:]
    assert not set(again) & set(names)
    assert pinned(manager, names) == 10
    assert pinned(manager, chain(other).keys()) == 13
    manager.check_invariants()


def test_a_chain_of_other_tokens_is_not_believed():
    manager = asked_by_key()
    stale = chain(PROMPT)
    stale.keys()
    tokens = [*PROMPT[: 4 * T], *([7] * 6 * T)]
    serve(manager, 0, tokens, stale)
    assert pinned(manager, chain(tokens).keys()) == 10
    assert pinned(manager, chain(PROMPT).keys()) == 4


def test_a_chain_of_another_root_is_not_believed():
    manager = asked_by_key()
    serve(manager, 0, PROMPT[: 4 * T], chain(PROMPT[: 4 * T]))
    other = chain(PROMPT, root=BlockKey(b"o" * 32))
    manager.add_sequence(1, PROMPT, keys=other)
    assert other.num_hashed == 0
    names = other.keys()
    manager.commit(1, len(PROMPT))
    assert pinned(manager, names) == 0
    assert pinned(manager, chain(PROMPT).keys()) == 10
