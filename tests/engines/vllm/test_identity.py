"""What computes differs while its names stay: never a hit, and hits where it does not differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import inside
import safetensors.torch
from vllm_engine import connector, engine, prompts_of

# Several engines, one after the other.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

PROMPTS = prompts_of(100, 70)
NOTHING = [0, 0]
LOADED = [96, 64]


def cached(answers) -> list[int]:
    return [one.cached for one in answers]


def tokens(answers) -> list[list[int]]:
    return [one.tokens for one in answers]


@pytest.fixture(scope="module")
def wanted(make_vllm_model):
    """What two models answer, without any store."""
    found = []
    for seed in (0, 1):
        with engine(make_vllm_model(seed=seed), None) as plain:
            found.append(plain.tokens(PROMPTS))
    assert found[0] != found[1]
    return found


@pytest.mark.planted("weights-reloaded", "vllm", "refused")
@pytest.mark.planted("paused", "vllm", "hit")
def test_weights_that_are_read_anew_from_another_directory(make_vllm_model, store, wanted):
    old, new = make_vllm_model(), make_vllm_model(seed=1)
    with engine(old, connector(store), core_process=True) as made:
        assert made.tokens(PROMPTS) == wanted[0]
        made.flush()
        # A pause that clears caches, and sleep.
        made.llm.sleep(level=1)
        made.llm.wake_up()
        made.check(PROMPTS, wanted[0], LOADED)
        made.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
        made.forget_device()
        for _ in range(2):
            made.check(PROMPTS, wanted[1], NOTHING)
            made.flush()
            made.forget_device()
        assert made.llm.reset_prefix_cache(reset_connector=True)
        for expected in (NOTHING, LOADED):
            made.check(PROMPTS, wanted[1], expected)
            made.flush()
            made.forget_device()
    with engine(old, connector(store)) as fresh:
        fresh.check(PROMPTS, wanted[0], LOADED)
    with engine(new, connector(store)) as other:
        other.check(PROMPTS, wanted[1], NOTHING)


@pytest.mark.planted("weights-updated", "vllm", "refused")
@pytest.mark.planted("uncounted-write", "vllm", "refused")
def test_weights_that_are_written_to_in_the_worker(llama, store, wanted):
    with engine(llama, connector(store), core_process=True) as made:
        assert made.tokens(PROMPTS) == wanted[0]
        made.flush()
        made.inside(inside.scale, 2.0)
        made.forget_device()
        changed = made.answer(PROMPTS)
        assert tokens(changed) != wanted[0]
        made.flush()
        made.forget_device()
        made.check(PROMPTS, tokens(changed), NOTHING)
        assert made.llm.reset_prefix_cache(reset_connector=True)
        for expected in (NOTHING, LOADED):
            made.check(PROMPTS, tokens(changed), expected)
            made.flush()
            made.forget_device()
    with engine(llama, connector(store)) as fresh:
        fresh.check(PROMPTS, wanted[0], LOADED)


# ---------------------------------------------------------------------- the model's directory


def shards_beside(directory: Path, model: Path) -> None:
    """`model` in two shards with an index, beside the file that is there."""
    weights = safetensors.torch.load_file(model / "model.safetensors")
    names = sorted(weights)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for number, file in enumerate(files):
        part = {name: weights[name] for name in names[number::2]}
        safetensors.torch.save_file(part, directory / file, {"format": "pt"})
    where = {name: files[number % 2] for number, name in enumerate(names)}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}), encoding="utf-8")


def consolidated_beside(directory: Path, model: Path) -> None:
    """`model` in the file that ``load_format=auto`` takes before others."""
    shutil.copy(model / "model.safetensors", directory / "consolidated.safetensors")


def named_by_configuration(directory: Path, model: Path) -> None:
    """`model` in a file that vLLM reads; ``config.json`` names the other one."""
    (directory / "model.safetensors").rename(directory / "mine.safetensors")
    shutil.copy(model / "model.safetensors", directory)
    path = directory / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(settings | {"transformers_weights": "mine.safetensors"}))


@pytest.mark.parametrize(
    "put",
    [
        pytest.param(shards_beside, marks=pytest.mark.planted("file-beside-index", "vllm", "key")),
        pytest.param(
            consolidated_beside, marks=pytest.mark.planted("consolidated-beside-hf", "vllm", "key")
        ),
        pytest.param(
            named_by_configuration, marks=pytest.mark.planted("transformers-weights", "vllm", "key")
        ),
    ],
)
def test_files_that_vllm_reads_beside_those_that_transformers_reads(
    make_vllm_model, store, tmp_path, put
):
    found = []
    for seed in (1, 2):
        directory = shutil.copytree(make_vllm_model(), tmp_path / str(seed))
        put(directory, make_vllm_model(seed=seed))
        with engine(directory, connector(store)) as made:
            answers = made.answer(PROMPTS)
            made.flush()
            made.forget_device()
            made.check(PROMPTS, tokens(answers), LOADED)
        assert cached(answers) == NOTHING
        found.append(tokens(answers))
    assert found[0] != found[1]


@pytest.mark.planted("replaced-after-loading", "vllm", "refused")
def test_a_directory_that_changes_behind_the_configuration_is_refused(
    make_vllm_model, store, tmp_path, monkeypatch
):
    """In the user's own process, where the engine's is older than the model may be."""
    from vllm.v1.engine.core import EngineCore

    from kvconnect.errors import ModelChanged

    directory = shutil.copytree(make_vllm_model(), tmp_path / "model")
    begin = EngineCore.__init__

    def replace_and_begin(self, *arguments, **named) -> None:
        consolidated_beside(directory, make_vllm_model(seed=1))
        begin(self, *arguments, **named)

    monkeypatch.setattr(EngineCore, "__init__", replace_and_begin)
    with pytest.raises(ModelChanged, match="changed after"), engine(directory, connector(store)):
        pass
