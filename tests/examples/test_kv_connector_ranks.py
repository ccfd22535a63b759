"""``examples/kv_connector.py`` on several ranks: a restart answers what it answered before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.engine.checkpoint.random_model import make_model

EXAMPLE = "kv_connector"
T = 16
PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 256, 90)]
FULL_BLOCKS = 89 // T


@pytest.fixture
def folder(example, tmp_path: Path, monkeypatch, repository_root: Path) -> Path:
    directory = tmp_path / "blocks"
    monkeypatch.setenv(example.CACHE_FOLDER, str(directory))
    monkeypatch.syspath_prepend(str(repository_root / "examples"))  # the other ranks import it
    return directory


@pytest.fixture
def ask(folder: Path, model: Path):
    """Makes an engine of `ranks`, asks, ends all its processes."""

    def run(
        ranks: int, *, attached: bool = True, model: Path = model, prompt=PROMPT, max_tokens=20
    ):
        connector = KvCacheConnectorConfig(
            connector_module=EXAMPLE,
            connector_scheduler_class="PersistentKvCacheConnectorLeader",
            connector_worker_class="PersistentKvCacheConnectorWorker",
        )
        with LLM(
            model,
            kv_cache=KvCacheConfig(tokens_per_block=T, max_tokens=1024),
            connector=connector if attached else None,
            dtype="float64",
            tensor_parallel_size=ranks,
        ) as llm:
            return llm.generate([prompt], SamplingParams(max_tokens=max_tokens, ignore_eos=True))[0]

    return run


def blocks_of(output) -> int:
    """Full blocks of a prompt and its answer, the last token of which has no KV."""
    return (output.prompt_tokens + len(output.output_token_ids) - 1) // T


@pytest.mark.planted("rank-share", "engine", "key")
def test_two_ranks_answer_a_restart_as_they_did_before(ask, folder: Path):
    cold, warm = ask(2), ask(2)
    assert warm.output_token_ids == cold.output_token_ids
    assert cold.output_token_ids == ask(1, attached=False).output_token_ids
    assert (cold.reused_store_tokens, warm.reused_store_tokens) == (0, FULL_BLOCKS * T)
    assert len(list(folder.iterdir())) == 2 * blocks_of(cold)


@pytest.mark.slow
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_four_ranks_store_heads_that_several_hold_once(ask, folder, tmp_path, num_kv_heads):
    model = make_model(tmp_path / "model", "llama", num_heads=4, num_kv_heads=num_kv_heads)
    cold, warm = ask(4, model=model), ask(4, model=model)
    assert warm.output_token_ids == cold.output_token_ids
    assert cold.output_token_ids == ask(1, model=model, attached=False).output_token_ids
    assert warm.reused_store_tokens == FULL_BLOCKS * T
    assert len(list(folder.iterdir())) == num_kv_heads * blocks_of(cold)


@pytest.mark.slow
def test_what_is_computed_behind_one_rank_s_failed_load_is_kept_on_no_rank(
    ask, folder: Path, example
):
    """The other rank loads well, but what it computes next comes from the damaged share, too."""
    expected = ask(1, attached=False).output_token_ids
    ask(2, prompt=PROMPT[: 2 * T + 1], max_tokens=1)
    file, *_ = sorted(folder.iterdir())  # one of two blocks, of one of two ranks
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    found = ask(2)
    assert found.output_token_ids == expected
    assert found.reused_store_tokens < 2 * T
    loaded = ask(2)
    assert loaded.output_token_ids == expected
    assert loaded.reused_store_tokens == FULL_BLOCKS * T


@pytest.mark.slow
def test_another_number_of_ranks_finds_nothing_in_files_of_its_own_shares(ask, folder: Path):
    cold = ask(2)
    alone = ask(1)
    assert (alone.output_token_ids, alone.reused_store_tokens) == (cold.output_token_ids, 0)


@pytest.mark.slow
def test_the_script_runs_on_two_ranks(example, model: Path, repository_root: Path):
    run = subprocess.run(
        [sys.executable, "examples/kv_connector.py", str(model), "--tensor-parallel-size", "2"],
        cwd=repository_root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout.splitlines()[-1]) == (0, "The answers are the same."), run
