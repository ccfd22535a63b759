"""A load that fails after the last layer: nobody ever sees a token of that step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from failing_connector import Behaviour, behaviour
from harness import PARAMS, PROMPT, T, answer, open_llm

from kvconnect import KvCacheConnectorConfig

CONNECTOR = KvCacheConnectorConfig(
    connector_module="failing_connector",
    connector_scheduler_class="FailingScheduler",
    connector_worker_class="FailingWorker",
)


@pytest.fixture(autouse=True)
def planted() -> Iterator[None]:
    """Each test starts from the default behaviour."""
    vars(behaviour).update(vars(Behaviour()))
    yield
    behaviour.may_return.set()


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("num_tokens", [64, 70, len(PROMPT) - 1])
def test_nothing_of_a_failed_load_is_seen(
    model: Path, expected: list[int], num_tokens: int, in_background: bool
) -> None:
    behaviour.num_tokens, behaviour.in_background = num_tokens, in_background
    with open_llm(model, CONNECTOR) as llm:
        streamed = [t for chunk in llm.stream(PROMPT, PARAMS) for t in chunk.token_ids]
        assert streamed == expected
        # Nor is it in the tree: a second request reuses what the first one computed itself.
        again = llm.generate([PROMPT], PARAMS)[0]
    assert list(again.output_token_ids) == expected
    assert again.reused_device_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("in_background", [False, True])
def test_blocks_that_are_still_written_to_are_not_handed_on(
    model: Path, expected: list[int], in_background: bool
) -> None:
    behaviour.writes_ended, behaviour.in_background = False, in_background
    others = [PROMPT[i:] for i in range(1, 9)]
    alone = [answer(model, prompt=prompt).output_token_ids for prompt in others]
    with open_llm(model, CONNECTOR) as llm:
        assert list(llm.generate([PROMPT], PARAMS)[0].output_token_ids) == expected
        assert behaviour.late_blocks, "the late writer never wrote: this test shows nothing"
        # Held: everything past the valid position, of which the load has the first blocks.
        held = llm.stats().max_blocks - llm.stats().free_blocks
        assert held == -(-len(PROMPT) // T)
        # The pool is gone through more than once, never these blocks.
        for _ in range(2):
            outputs = llm.generate(others, PARAMS)
            assert [output.output_token_ids for output in outputs] == alone
        assert list(llm.generate([PROMPT], PARAMS)[0].output_token_ids) == expected
        behaviour.may_return.set()
        llm.generate([PROMPT], PARAMS)
        llm.generate([PROMPT], PARAMS)
        assert llm.stats().free_blocks == llm.stats().max_blocks
