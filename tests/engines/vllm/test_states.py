"""Qwen3-Next in a real engine: gated delta nets beside full attention, in blocks of 96 tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import inside
from state_models import STATE_BLOCK, write_qwen3_next
from vllm_engine import connector, engine, prompts_of

pytestmark = pytest.mark.engines

PROMPTS = prompts_of(5 * STATE_BLOCK + 7, 2 * STATE_BLOCK, 40)
LOADED = [5 * STATE_BLOCK, STATE_BLOCK, 0]
"""What of them is loaded: up to the last state before the last token."""

hybrid = partial(engine, dtype="bfloat16", mamba_ssm_cache_dtype="float32")


@pytest.fixture(scope="session")
def qwen3_next(tmp_path_factory) -> Path:
    return write_qwen3_next(tmp_path_factory.mktemp("qwen3-next"))


def test_restart_from_disk(qwen3_next, store):
    with hybrid(qwen3_next, None) as plain:
        wanted = plain.tokens(PROMPTS)
    with hybrid(qwen3_next, connector(store)) as first:
        cold = first.answer(PROMPTS)
        again = first.answer(PROMPTS)
        first.flush()
        first.forget_device()
        loaded = first.answer(PROMPTS)
    with hybrid(qwen3_next, connector(store)) as second:
        restarted = second.answer(PROMPTS)
    for answers in (cold, again, loaded, restarted):
        assert [one.tokens for one in answers] == wanted
    assert [one.cached for one in cold] == [0, 0, 0]
    for answers in (again, loaded, restarted):
        assert [one.cached for one in answers] == LOADED


def test_chunks_end_where_states_are_saved(qwen3_next, store):
    """A chunk of a long prompt ends with a block, and its state serves prompts that part there."""
    long = prompts_of(9 * STATE_BLOCK + 11)[0]
    parted = [long[: 4 * STATE_BLOCK + 30] + prompts_of(50, seed=2)[0]]
    with hybrid(qwen3_next, None) as plain:
        wanted = plain.tokens([long]), plain.tokens(parted)
    with hybrid(
        qwen3_next, connector(store), max_num_batched_tokens=2 * STATE_BLOCK + 5, max_num_seqs=4
    ) as made:
        assert made.tokens([long]) == wanted[0]
        made.flush()
        made.forget_device()
        [answer] = made.answer([long])
        assert ([answer.tokens], answer.cached) == (wanted[0], 9 * STATE_BLOCK)
        made.forget_device()
        [answer] = made.answer(parted)
        assert ([answer.tokens], answer.cached) == (wanted[1], 4 * STATE_BLOCK)


def test_a_device_hit_is_continued_from_the_store(qwen3_next, store):
    """VLLM has the keys and values of some blocks; a state of the store stands for all of them."""
    long = prompts_of(6 * STATE_BLOCK + 3)[0]
    with hybrid(qwen3_next, connector(store)) as made:
        wanted = made.tokens([long])
        made.flush()
        made.forget_device()
        made.answer([long[: 2 * STATE_BLOCK + 1]])
        [answer] = made.answer([long])
        assert ([answer.tokens], answer.cached) == (wanted[0:1], 6 * STATE_BLOCK)


def test_no_fault_of_the_store_changes_a_token(qwen3_next, tmp_path):
    with hybrid(qwen3_next, connector(f"faulty://states{tmp_path}", load_timeout_s=2.0)) as made:
        wanted = made.tokens(PROMPTS)
        made.flush()
        for fault in ("swap", "flip", "raise"):
            made.forget_device()
            made.inside(inside.plant, "states", fault, ["load"])
            assert made.tokens(PROMPTS) == wanted
            made.inside(inside.heal, "states")
        made.check_empty()


def test_preempted_requests_answer_the_same(qwen3_next, store):
    """Few tokens: what prefill computes of answers differs from decode in its last bits."""
    prompts = prompts_of(*(2 * STATE_BLOCK - 3 - n for n in range(5)))
    length = 16
    with hybrid(qwen3_next, None) as plain:
        wanted = [plain.tokens([one], length)[0] for one in prompts]
    with hybrid(
        qwen3_next, connector(store), num_gpu_blocks_override=34, max_model_len=768
    ) as made:
        preempted = []
        preempt = made.scheduler._preempt_request
        made.scheduler._preempt_request = lambda request, *args, **more: (
            preempted.append(request.request_id),
            preempt(request, *args, **more),
        )
        cold = made.tokens(prompts, length)
        assert preempted
        made.flush()
        made.forget_device()
        longer = [[*prompt, *tokens] for prompt, tokens in zip(prompts, cold, strict=True)]
        again = made.answer(prompts, length)
        made.answer(longer, 2)
    assert cold == wanted
    assert [one.tokens for one in again] == wanted
    assert all(one.cached for one in again)


def test_a_core_of_its_own(qwen3_next, store):
    """As under ``vllm serve``: scheduler and worker are processes."""
    with hybrid(qwen3_next, connector(store), core_process=True) as first:
        wanted = first.tokens(PROMPTS)
        first.flush()
        first.forget_device()
        loaded = first.answer(PROMPTS)
    assert [one.tokens for one in loaded] == wanted
    assert [one.cached for one in loaded] == LOADED


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_have_parts_of_the_states(tmp_path, store, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # or two ranks want two NUMA nodes
    model = write_qwen3_next(tmp_path / "two-heads", heads=2)
    answers = []
    for _ in range(2):
        with hybrid(model, connector(store), core_process=True, tensor_parallel_size=2) as made:
            answers.append(made.answer(PROMPTS))
            made.flush()
    cold, loaded = answers
    assert [one.tokens for one in loaded] == [one.tokens for one in cold]
    assert [one.cached for one in cold] == [0, 0, 0]
    assert all(one.cached for one in loaded[:1])
