"""A request as schedulers and connectors see it."""

from __future__ import annotations

import numpy as np
import pytest

from kvconnect.errors import ConfigurationError
from kvconnect.keys import BlockKey, Namespace
from kvconnect.request import (
    ExternalMatch,
    LlmRequest,
    RequestState,
    SamplingParams,
    ScheduledBatch,
)

ROOT = BlockKey(b"r" * 32)


def make_request(num_tokens: int = 10, **more) -> LlmRequest:
    tokens = np.arange(num_tokens, dtype=np.int32)
    return LlmRequest(7, tokens, chain_root=ROOT, tokens_per_block=4, **more)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ConfigurationError, match="prompt: at least one token"):
        make_request(0)


def test_tokens_are_prompt_and_then_what_was_generated():
    request = make_request(3)
    request.append_tokens(np.array([8, 9], np.int32))
    assert request.get_tokens(0) == [0, 1, 2, 8, 9]
    assert (request.prompt_len, request.num_tokens, request.num_generated_tokens) == (3, 5, 2)


def test_get_tokens_gives_lists_of_the_callers_own_of_the_one_beam():
    request = make_request(3)
    for _ in range(2):
        assert [request.get_tokens(0)] == request.get_tokens() == [[0, 1, 2]]
        request.get_tokens(0).append(99)
        request.get_tokens()[0].append(99)
    with pytest.raises(ConfigurationError, match="beam: 1 does not exist"):
        request.get_tokens(beam=1)


def test_a_rewind_shortens_tokens_and_keys():
    request = make_request(10)
    keys = request.block_keys()
    assert len(keys) == 2
    request.rewind(7)
    assert request.get_tokens(0) == list(range(7))
    assert request.block_keys() == keys[:1]
    request.append_tokens(np.array([1, 1, 1], np.int32))
    assert request.block_keys()[0] == keys[0]
    assert request.block_keys()[1] != keys[1]


def test_the_context_is_present_as_far_as_it_is_computed_or_comes_from_a_store():
    request = make_request(10)
    assert request.context_current_position == 0
    request.state, request.num_computed_tokens = RequestState.CONTEXT, 4
    assert request.context_current_position == 4
    request.num_external_tokens = 8
    assert request.context_current_position == 8
    request.num_computed_tokens, request.num_external_tokens = 10, 0
    request.append_tokens(np.array([1, 2], np.int32))
    request.state, request.num_computed_tokens = RequestState.GENERATION, 11
    assert request.context_current_position == 10
    # Preempted, and admitted again: what was generated counts as prompt.
    request.state, request.num_computed_tokens = RequestState.CONTEXT, 11
    assert request.context_current_position == 11


def test_the_namespace_is_seen_through_the_request():
    request = make_request(namespace=Namespace("salt", "adapter", 3))
    assert (request.cache_salt, request.lora_id, request.extra_key) == ("salt", "adapter", 3)


def test_an_external_match_ends_where_it_says():
    assert ExternalMatch(32, 16).end == 48
    assert ExternalMatch().end == 0


def test_a_batch_computes_context_requests_first():
    context, generation, loading = make_request(), make_request(), make_request()
    batch = ScheduledBatch([context], [generation], loading_requests=[loading])
    assert batch.requests == [context, generation]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("stop", ("",)),
    ],
)
def test_sampling_settings_are_checked_by_name(field, value):
    with pytest.raises(ConfigurationError, match=rf"SamplingParams\.{field}"):
        SamplingParams(**{field: value})
