"""Salt, retention and the use of stores: for all prompts of a call, or one each."""

from __future__ import annotations

import pytest

from kvconnect import KvCacheRetentionConfig, SamplingParams, TokenRangeRetentionConfig
from kvconnect.errors import ConfigurationError
from kvconnect.keys import Namespace

ONE = SamplingParams(max_tokens=1)
PROMPT = list(range(40))


def keep(priority):
    return KvCacheRetentionConfig(
        token_range_retention_configs=(TokenRangeRetentionConfig(token_start=0, priority=priority),)
    )


def test_a_salt_each(llama, open_llm):
    llm = open_llm(llama)
    llm.generate([PROMPT], ONE, cache_salt="a")
    outputs = llm.generate([PROMPT] * 3, ONE, cache_salt=["a", "b", None])
    assert [output.reused_device_tokens for output in outputs] == [39, 0, 0]
    outputs = llm.generate([PROMPT] * 3, ONE, cache_salt=("b", "a", None))
    assert [output.reused_device_tokens for output in outputs] == [39, 39, 39]


def test_a_salt_of_several_letters_is_one_salt(llama, open_llm):
    llm = open_llm(llama)
    llm.generate([PROMPT, PROMPT], ONE, cache_salt="ab")
    assert llm.generate([PROMPT], ONE, cache_salt="a")[0].reused_device_tokens == 0
    assert llm.generate([PROMPT], ONE, cache_salt="ab")[0].reused_device_tokens == 39


@pytest.fixture
def watched(llama, open_llm):
    """Returns an engine, and a list that gets the priorities of each request's blocks."""
    llm = open_llm(llama)
    kv, seen = llm._engine._kv, {}
    update = kv.update_resources

    def update_watched(batch):
        update(batch)
        seen.update({one.request_id: kv.get_priorities(one) for one in batch.requests})

    kv.update_resources = update_watched
    return llm, seen


@pytest.mark.parametrize("each", [False, True])
def test_retention_reaches_the_blocks(each, watched):
    llm, seen = watched
    retention = [keep(90), None, keep(10)] if each else keep(90)
    llm.generate([[1] * 40, [2] * 40, [3] * 40], ONE, retention=retention)
    assert list(seen.values()) == [[p] * 3 for p in ((90, 35, 10) if each else (90, 90, 90))]


@pytest.mark.parametrize("each", [False, True])
def test_the_priority_of_a_request_reaches_the_blocks(each, watched):
    llm, seen = watched
    cache = [{"priority": 90}, None, {"priority": 10, "ttl": "1h"}] if each else {"priority": 90}
    llm.generate([[1] * 40, [2] * 40, [3] * 40], ONE, cache=cache)
    assert list(seen.values()) == [[p] * 3 for p in ((90, 35, 10) if each else (90, 90, 90))]


def test_all_completions_of_a_prompt_use_stores_alike(watched):
    llm, seen = watched
    params = SamplingParams(max_tokens=1, n=2, temperature=1.0)
    llm.generate([PROMPT], params, cache={"priority": 90})
    assert list(seen.values()) == [[90] * 3] * 2


def test_all_completions_of_a_prompt_are_of_its_namespace(llama, open_llm):
    params = SamplingParams(max_tokens=1, n=2, temperature=1.0)
    namespace, cache = Namespace("a", 3, "x"), {"save": False, "load": False}
    made = open_llm(llama)._make(PROMPT, params, namespace, None, None, cache, trace_headers=None)
    first, second = (one.request for one in made)
    for name in ("namespace", "cache", "retention", "kv_transfer_params"):
        assert getattr(second, name) == getattr(first, name)
    assert second.namespace == namespace
    assert second.key_chain.root == first.key_chain.root


def test_the_worth_is_said_once(llama, open_llm):
    llm = open_llm(llama)
    with pytest.raises(ConfigurationError, match="retention, cache: both say"):
        llm.generate([PROMPT], ONE, retention=keep(9), cache={"ttl": 5})
    llm.generate([PROMPT], ONE, retention=keep(9), cache={"load": False})
    with pytest.raises(ConfigurationError, match=r"unknown field 'sav'.*'save'"):
        llm.submit(PROMPT, ONE, cache={"sav": True})


@pytest.mark.parametrize(
    "field", ["sampling_params", "cache_salt", "retention", "kv_transfer_params", "cache"]
)
def test_as_many_as_prompts(field, llama, open_llm):
    with pytest.raises(ConfigurationError, match=f"{field}: 2 were given for 3 prompts"):
        open_llm(llama).generate([PROMPT] * 3, **{field: [None, None]})
