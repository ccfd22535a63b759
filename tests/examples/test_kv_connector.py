"""``examples/kv_connector.py`` runs, and never leads to a wrong token."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.engine.checkpoint.random_model import make_model

EXAMPLE = "kv_connector"
T = 16
PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 256, 150)]
FULL_BLOCKS = 149 // T  # the last token is always computed
SAMPLING = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture
def folder(example, tmp_path: Path, monkeypatch, repository_root: Path) -> Path:
    directory = tmp_path / "blocks"
    monkeypatch.setenv(example.CACHE_FOLDER, str(directory))
    monkeypatch.syspath_prepend(str(repository_root / "examples"))  # the other ranks import it
    return directory


@pytest.fixture
def engine(example, folder: Path, model: Path):
    """Makes an engine with the example's connector, or without one."""

    def make(*, attached: bool = True, model: Path = model, **more) -> LLM:
        connector = KvCacheConnectorConfig(
            connector_module=EXAMPLE,
            connector_scheduler_class="PersistentKvCacheConnectorLeader",
            connector_worker_class="PersistentKvCacheConnectorWorker",
        )
        cache = KvCacheConfig(tokens_per_block=T, max_tokens=1024)
        return LLM(
            model,
            kv_cache=cache,
            connector=connector if attached else None,
            dtype="float64",
            **more,
        )

    return make


@pytest.fixture
def ask(engine):
    """Makes an engine, asks, destroys it."""

    def run(prompt: list[int] = PROMPT, sampling: SamplingParams = SAMPLING, **more):
        with engine(**more) as llm:
            return llm.generate([prompt], sampling)[0]

    return run


def test_the_script_runs(
    example, folder: Path, model: Path, repository_root: Path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["kv_connector.py", str(model)])
    runpy.run_path(str(repository_root / "examples/kv_connector.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert out.endswith("The answers are the same.\n")
    length = len(example.PROMPT)  # a token per byte
    loaded = (length - 1) // 32 * 32
    assert (
        f"of {length} prompt tokens {loaded} came from files, {length - loaded} were computed"
    ) in out
    assert len(list(folder.iterdir())) == (length + 31) // 32


def test_a_new_engine_loads_every_full_block(ask):
    """Blocks of the answer, too, and those of a beginning in common."""
    cold, warm, chunked = ask(), ask(), ask(max_num_tokens=40)
    assert cold.reused_store_tokens == 0
    for found in (warm, chunked):
        assert found.reused_store_tokens == FULL_BLOCKS * T
        assert found.computed_tokens == len(PROMPT) - FULL_BLOCKS * T
        assert found.output_token_ids == cold.output_token_ids
    assert cold.output_token_ids == ask(attached=False).output_token_ids
    conversation = PROMPT + list(cold.output_token_ids)
    longer = ask([*conversation, 1, 2, 3])
    assert longer.reused_store_tokens == (len(conversation) - 1) // T * T
    assert longer.output_token_ids == ask([*conversation, 1, 2, 3], attached=False).output_token_ids
    other = [*PROMPT[:70], *reversed(PROMPT)]
    found = ask(other)
    assert found.reused_store_tokens == 70 // T * T
    assert found.output_token_ids == ask(other, attached=False).output_token_ids


def test_blocks_on_the_device_are_not_loaded_again(engine, folder: Path):
    with engine() as llm:
        first = llm.generate([PROMPT], SAMPLING)[0]
        second = llm.generate([PROMPT], SAMPLING)[0]
    assert second.output_token_ids == first.output_token_ids
    assert (second.reused_device_tokens, second.reused_store_tokens) == (len(PROMPT) - 1, 0)


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _replace(file: Path) -> None:
    other = next(each for each in sorted(file.parent.iterdir()) if each != file)
    file.write_bytes(other.read_bytes())


@pytest.fixture
def fourth(engine, folder: Path) -> Path:
    """The file of the prompt's fourth block."""
    with engine() as llm:
        keys = list(llm.store_keys({"prompt_token_ids": PROMPT}))
    return folder / f"{keys[3].hex()}.safetensors"


def test_a_damaged_file_costs_time_and_nothing_else(ask, fourth: Path, capsys):
    cold = ask()
    for damage in (_flip, _truncate, _replace):
        damage(fourth)  # what is before it is still good
        found = ask()
        assert found.output_token_ids == cold.output_token_ids
        assert found.reused_store_tokens <= 3 * T
        assert "cannot load" in capsys.readouterr().err
        repaired = ask()
        assert repaired.reused_store_tokens == FULL_BLOCKS * T
        assert repaired.output_token_ids == cold.output_token_ids


def test_nothing_that_was_computed_behind_a_failed_load_is_kept(ask, fourth: Path):
    expected = ask(attached=False).output_token_ids
    ask(PROMPT[: 4 * T + 1])
    # Of the blocks behind it there is no file yet: the step of the failed load computes them.
    _flip(fourth)
    assert ask().output_token_ids == expected
    loaded = ask()
    assert loaded.reused_store_tokens == FULL_BLOCKS * T
    assert loaded.output_token_ids == expected


def test_a_folder_that_cannot_be_written_loses_the_cache_and_nothing_else(
    ask, folder: Path, monkeypatch, example, capsys
):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(example.tempfile, "mkstemp", refuse)
    assert ask().output_token_ids == ask(attached=False).output_token_ids
    assert not list(folder.iterdir())
    assert "No space left on device" in capsys.readouterr().err


def test_many_requests_at_once_get_their_own_blocks(engine):
    rng = np.random.default_rng(5)
    prompts = [PROMPT[: 16 * n] + rng.integers(0, 256, 30).tolist() for n in range(6)]
    with engine(attached=False) as llm:
        expected = [output.output_token_ids for output in llm.generate(prompts, SAMPLING)]
    for _ in range(2):
        with engine(max_num_tokens=64) as llm:
            outputs = llm.generate(prompts, SAMPLING)
        assert [output.output_token_ids for output in outputs] == expected
    assert all(output.reused_store_tokens > 0 for output in outputs)


# ---------------------------------------------------------------------- several ranks

TWO = {"tensor_parallel_size": 2}


def blocks_of(output) -> int:
    """Full blocks of a prompt and its answer, the last token of which has no KV."""
    return (output.prompt_tokens + len(output.output_token_ids) - 1) // T


@pytest.mark.planted("rank-share", "engine", "key")
def test_two_ranks_answer_a_restart_as_they_did_before(ask, folder: Path):
    cold, warm = ask(**TWO), ask(**TWO)
    assert warm.output_token_ids == cold.output_token_ids
    assert cold.output_token_ids == ask(attached=False).output_token_ids
    assert (cold.reused_store_tokens, warm.reused_store_tokens) == (0, FULL_BLOCKS * T)
    assert len(list(folder.iterdir())) == 2 * blocks_of(cold)


@pytest.mark.slow
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_four_ranks_store_heads_that_several_hold_once(ask, folder, tmp_path, num_kv_heads):
    model = make_model(tmp_path / "model", "llama", num_heads=4, num_kv_heads=num_kv_heads)
    cold, warm = (ask(model=model, tensor_parallel_size=4) for _ in "12")
    assert warm.output_token_ids == cold.output_token_ids
    assert cold.output_token_ids == ask(model=model, attached=False).output_token_ids
    assert warm.reused_store_tokens == FULL_BLOCKS * T
    assert len(list(folder.iterdir())) == num_kv_heads * blocks_of(cold)


@pytest.mark.slow
def test_what_is_computed_behind_one_rank_s_failed_load_is_kept_on_no_rank(ask, folder: Path):
    """The other rank loads well, but what it computes next comes from the damaged share, too."""
    expected = ask(attached=False).output_token_ids
    ask(PROMPT[: 2 * T + 1], SamplingParams(max_tokens=1), **TWO)
    _flip(min(folder.iterdir()))  # one of two blocks, of one of two ranks
    found = ask(**TWO)
    assert found.output_token_ids == expected
    assert found.reused_store_tokens < 2 * T
    loaded = ask(**TWO)
    assert loaded.output_token_ids == expected
    assert loaded.reused_store_tokens == FULL_BLOCKS * T


@pytest.mark.slow
def test_another_number_of_ranks_finds_nothing_in_files_of_its_own_shares(ask):
    cold, alone = ask(**TWO), ask()
    assert (alone.output_token_ids, alone.reused_store_tokens) == (cold.output_token_ids, 0)


@pytest.mark.slow
def test_the_script_runs_on_two_ranks(model: Path, repository_root: Path):
    run = subprocess.run(
        [sys.executable, "examples/kv_connector.py", str(model), "--tensor-parallel-size", "2"],
        cwd=repository_root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout.splitlines()[-1]) == (0, "The answers are the same."), run
