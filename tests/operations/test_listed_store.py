"""A listing of a whole store: its tenants, its tree, and the tokens of branches."""

from __future__ import annotations

import asyncio

import pytest
from stored_blocks import fill, prompt_chain

from kvconnect import BackendUnavailable, ConfigurationError, PromptStore
from kvconnect.keys import Namespace, salt_tag
from kvconnect.operations import listed_store
from kvconnect.operations.listed_store import list_store, tokens_of

ACME = Namespace("acme")
PROMPT = list(range(100, 122))


def listed(url, names=None):
    return asyncio.run(list_store(url, names or {}, lambda _: None))


def rows_of(found):
    tree = found.tree
    return [
        row for space in tree.rows(None, 0, 9).rows for row in tree.rows(space.node, 0, 99).rows
    ]


def test_tenants_are_those_of_stats(url):
    fill(url, prompt_chain(PROMPT, namespace=ACME))
    fill(url, prompt_chain(PROMPT[:8]))
    names = {salt_tag("acme"): "Acme"}
    found = listed(url, names)
    assert found.tenants == PromptStore(url).tenants(names)
    assert [one.name for one in found.tenants] == ["Acme", "(no salt)"]
    assert found.tenant_numbers == {salt_tag("acme"): 1, salt_tag(None): 2}
    assert (found.tree.num_blocks, found.complete) == (8, True)


def test_a_tiered_store_counts_a_block_once_in_the_tree_and_in_each_tier_for_its_tenant(tmp_path):
    near, far = f"disk:{tmp_path}/near", f"disk:{tmp_path}/far"
    fill(near, prompt_chain(PROMPT[:8]))
    fill(far, prompt_chain(PROMPT))
    url = f"tiered:?tiers={near},{far}"
    found = listed(url)
    assert found.tree.num_blocks == 6
    assert found.tenants == PromptStore(url).tenants()
    assert found.tenants[0].blocks == 8
    assert asyncio.run(tokens_of(url, found.tree, rows_of(found)))[0].tolist() == PROMPT


def test_tokens_of_branches_up_to_64(url):
    long = [7, *range(300)]
    fill(url, prompt_chain(long))
    fill(url, prompt_chain(PROMPT, namespace=ACME))
    fill(url, prompt_chain([5, 6]))
    found = listed(url)
    rows = rows_of(found)
    tokens = [one.tolist() for one in asyncio.run(tokens_of(url, found.tree, rows))]
    assert sorted(tokens) == sorted([long[:64], PROMPT, [5, 6]])
    assert asyncio.run(tokens_of(url, found.tree, [])) == []


def test_tokens_of_blocks_that_are_gone_are_none(url):
    fill(url, prompt_chain(PROMPT))
    found = listed(url)
    PromptStore(url).drop(everything=True)
    (tokens,) = asyncio.run(tokens_of(url, found.tree, rows_of(found)))
    assert tokens.tolist() == []


def test_a_listing_is_bounded_and_says_so(url, monkeypatch):
    fill(url, prompt_chain(PROMPT))
    monkeypatch.setattr(listed_store, "MOST_BLOCKS", 6)
    assert listed(url).complete
    monkeypatch.setattr(listed_store, "MOST_BLOCKS", 5)
    found = listed(url)
    assert (found.tree.num_blocks, found.complete) == (5, False)


def test_stores_that_cannot_be_listed_are_refused():
    with pytest.raises(ConfigurationError, match="from outside there is nothing in it"):
        listed("memory:")
    with pytest.raises(BackendUnavailable):
        listed("redis://127.0.0.1:1/0?timeout=200ms")
