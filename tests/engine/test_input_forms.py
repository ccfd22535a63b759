"""Prompts and settings as dicts, what travels with requests, events, and adapters."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest
import torch

from kvconnect import KvCacheConnectorConfig, SamplingParams
from kvconnect.cache.pool.events import Created, Stored
from kvconnect.errors import ConfigurationError

ONE = SamplingParams(max_tokens=1)
TEXT = "Once upon a time"
TOKENS = list(TEXT.encode())


@pytest.fixture
def threads_take_turns_at_any_moment():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    "prompt",
    [
        TEXT,
        TOKENS,
        np.array(TOKENS),
        {"prompt": TEXT},
        {"prompt_token_ids": TOKENS},
        {"prompt_token_ids": np.array(TOKENS)},
        torch.tensor(TOKENS),
    ],
)
def test_one_prompt_in_any_form(llm, prompt):
    (single,), (listed,) = llm.generate(prompt, ONE), llm.generate([prompt], ONE)
    assert single.prompt_token_ids == listed.prompt_token_ids == tuple(TOKENS)
    assert llm.submit(prompt, ONE).result().prompt_token_ids == tuple(TOKENS)


def test_prompts_of_different_forms(llm):
    prompts = [TEXT, TOKENS, {"prompt": TEXT}, {"prompt_token_ids": TOKENS}]
    outputs = llm.generate(prompts, ONE)
    assert [one.prompt_token_ids for one in outputs] == [tuple(TOKENS)] * 4
    rows = llm.generate(torch.tensor([[1], [2]]), ONE)
    assert [one.prompt_token_ids for one in rows] == [(1,), (2,)]
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ({}, "either 'prompt' or 'prompt_token_ids'; this has neither"),
        ({"prompt": TEXT, "prompt_token_ids": TOKENS}, "this has both"),
        ({"promt": TEXT}, "prompt: unknown key 'promt'; did you mean 'prompt'"),
        ({"prompt": TOKENS}, "'prompt' is a string, this is list"),
        ({"prompt_token_ids": TEXT}, "'prompt_token_ids' is a sequence of integers, this is str"),
    ],
)
def test_a_dict_that_is_no_prompt(llm, prompt, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        llm.generate(prompt, ONE)


def test_configurations_as_dicts(open_llm, llama, tmp_path):
    llm = open_llm(
        llama,
        kv_cache={"tokens_per_block": 8, "max_tokens": 128},
        connector={"url": f"disk:{tmp_path}/kv?capacity=16MiB", "lookup_timeout_ms": 60_000},
        speculative={"num_draft_tokens": 3},
    )
    assert llm.layout.tokens_per_block == 8
    assert llm._engine._connector is not None
    retention = {"token_range_retention_configs": [{"token_start": 0, "priority": 90}]}
    outputs = llm.generate(
        [TEXT, TEXT], [{"max_tokens": 2}, {"max_tokens": 3}], retention=[retention, None]
    )
    assert [len(one.output_token_ids) for one in outputs] == [2, 3]
    assert len(llm.generate(TEXT, {"max_tokens": 4}, retention=retention)[0].output_token_ids) == 4
    llm.close()
    assert any((tmp_path / "kv").iterdir())


# ---------------------------------------------------------------- what travels with requests


def test_transfer_params_reach_the_connector(open_llm, llama):
    llm = open_llm(llama, connector=KvCacheConnectorConfig(url="memory:?capacity=1MiB"))
    seen = []
    told = llm._engine._connector.on_new_request

    def watched(request):
        seen.append(request.kv_transfer_params)
        return told(request)

    llm._engine._connector.on_new_request = watched
    llm.generate([TEXT, TEXT], ONE, kv_transfer_params={"from": "a"})
    llm.generate([TEXT, TEXT], ONE, kv_transfer_params=[{"from": "b"}, None])
    assert seen == [{"from": "a"}, {"from": "a"}, {"from": "b"}, None]
    (output,) = llm.generate(TEXT, ONE, kv_transfer_params={"from": "c"})
    assert output.kv_transfer_params == {"from": "c"}


def told(caplog):
    """What this package logged; asyncio tells of what earlier tests left, whenever it is found."""
    return [one.getMessage() for one in caplog.records if one.name.startswith("kvconnect")]


def test_an_adapter_that_is_not_applied_is_said_once(llm, caplog):
    with caplog.at_level(logging.WARNING):
        plain = llm.generate([TEXT, TEXT], ONE)
        assert not told(caplog)
        outputs = llm.generate([TEXT, TEXT], ONE, lora_id="my-adapter")
        llm.generate(TEXT, ONE, lora_id=3)
    (said,) = told(caplog)
    assert "lora_id='my-adapter': no adapter is applied" in said
    assert [one.output_token_ids for one in outputs] == [one.output_token_ids for one in plain]


# ---------------------------------------------------------------- events


def test_events_tell_what_can_be_reused(open_llm, llama):
    llm = open_llm(
        llama,
        kv_cache={"tokens_per_block": 16, "max_tokens": 256, "event_buffer_max_size": 100},
    )
    llm.generate([1] * 40, ONE)
    events = llm.take_events()
    assert isinstance(events[0].data, Created)
    stored = [block for one in events if isinstance(one.data, Stored) for block in one.data.blocks]
    assert [len(block.tokens) for block in stored] == [16, 16, 8]
    assert [one.event_id for one in events] == list(range(len(events)))
    assert llm.take_events() == []
    llm.generate([2] * 40, ONE)
    assert llm.take_events()[0].event_id == len(events)


def test_events_are_off_by_default(llm):
    llm.generate([1] * 40, ONE)
    assert llm.take_events() == []


@pytest.mark.usefixtures("threads_take_turns_at_any_moment")
def test_events_can_be_taken_while_the_engine_makes_them(open_llm, llama):
    llm = open_llm(
        llama,
        kv_cache={"tokens_per_block": 2, "max_tokens": 1024, "event_buffer_max_size": 10_000},
    )
    handles = [
        llm.submit([number] * 30, SamplingParams(max_tokens=30, ignore_eos=True))
        for number in range(8)
    ]
    events = []
    while not all(handle.done for handle in handles):
        events += llm.take_events()
    llm.close()
    events += llm.take_events()
    assert [one.event_id for one in events] == list(range(len(events)))
    assert len(events) > 100
