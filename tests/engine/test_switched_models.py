"""Whatever happens to a model directory while it is loaded, KV goes by the weights that made it."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from observed import patient
from transformers import AutoModelForCausalLM

from kvconnect import LLM, KvCacheConfig, SamplingParams
from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.engine.model import pretrained as loading
from kvconnect.errors import ConfigurationError, ModelChanged

PROMPT = random.Random(5).choices(range(1, 250), k=100)
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models that differ in their weights only."""
    root = tmp_path_factory.mktemp("switched")
    old, new = (make_model(root / name, "llama", seed=seed) for seed, name in enumerate("ab"))
    return old, new


@pytest.fixture
def current(models: tuple[Path, Path], tmp_path: Path) -> Path:
    """A link to the old model, as a rolling update switches it."""
    link = tmp_path / "current"
    link.symlink_to(models[0])
    return link


@pytest.fixture
def copied(models: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the old model that is written long ago, as far as mtimes say."""
    return shutil.copytree(models[0], tmp_path / "copied")


def switch(link: Path, target: Path) -> None:
    other = link.with_name("other")
    other.symlink_to(target)
    other.replace(link)


def replace(file: Path, source: Path) -> None:
    shutil.copy2(source, file.with_name("new"))
    file.with_name("new").replace(file)


def overwrite(file: Path, source: Path) -> None:
    """Write into `file` and put its mtime back."""
    before = file.stat()
    with file.open("r+b") as written:
        written.write(source.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def when_loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Does something between the loading of the weights and all that follows, once."""

    def arrange(change: Callable[[], None]) -> None:
        class Interrupted(AutoModelForCausalLM):
            @classmethod
            def from_pretrained(cls, *args: object, **more: object) -> object:
                model = AutoModelForCausalLM.from_pretrained(*args, **more)
                monkeypatch.undo()
                change()
                return model

        monkeypatch.setattr(loading, "AutoModelForCausalLM", Interrupted)

    return arrange


def answer(model: Path, store: Path | None = None, **more: str) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt's came from the store."""
    config = None if store is None else patient(f"disk://{store}?capacity=64MiB")
    cache = KvCacheConfig(max_tokens=512, tokens_per_block=16)
    with LLM(model, kv_cache=cache, connector=config, dtype="float64", **more) as llm:
        output = llm.generate(PROMPT, SamplingParams(max_tokens=16, ignore_eos=True))[0]
    return output.output_token_ids, output.reused_store_tokens


@pytest.mark.planted("switched-while-loading", "engine", "key")
def test_a_link_that_is_switched_after_the_weights_were_read(
    models, current, tmp_path, when_loaded
):
    old, new = map(answer, models)
    assert old != new
    when_loaded(lambda: switch(current, models[1]))
    assert answer(current, tmp_path / "kv") == old
    assert answer(current, tmp_path / "kv") == new  # nothing of the old one's
    assert answer(models[0], tmp_path / "kv") == (old[0], 99)  # by its own name it is found


def test_a_link_that_is_switched_at_any_moment(models, current, tmp_path):
    known = [answer(model)[0] for model in models]
    rng = random.Random(3)
    for attempt in range(4):
        target = models[(attempt + 1) % 2]
        switcher = threading.Timer(rng.random() * 0.15, switch, (current, target))
        switcher.start()
        first, _ = answer(current, tmp_path / "kv")
        switcher.join()
        assert first in known
        assert answer(target, tmp_path / "kv")[0] == known[(attempt + 1) % 2]


@pytest.mark.planted("switched-while-loading", "engine", "refused")
@pytest.mark.parametrize("change", [replace, overwrite])
def test_a_file_that_changes_while_the_model_is_loaded_is_refused(
    models, copied, tmp_path, when_loaded, change
):
    when_loaded(lambda: change(copied / WEIGHTS, models[1] / WEIGHTS))
    with pytest.raises(ModelChanged, match=r"copied/model.safetensors' changed while .* try again"):
        answer(copied, tmp_path / "kv")
    assert answer(copied, tmp_path / "kv") == answer(models[1])


@pytest.mark.planted("replaced-after-loading", "engine", "equal")
def test_a_file_that_is_written_to_later_changes_no_engine_that_runs(models, copied):
    cache, params = KvCacheConfig(max_tokens=512), SamplingParams(max_tokens=16, ignore_eos=True)
    with LLM(models[0], kv_cache=cache) as llm:
        expected = llm.generate(PROMPT, params)[0].output_token_ids
    # In the dtype of the file: converted weights are copies anyway.
    with LLM(copied, kv_cache=cache) as llm:
        (copied / WEIGHTS).write_bytes(bytes((copied / WEIGHTS).stat().st_size))
        assert llm.generate(PROMPT, params)[0].output_token_ids == expected


def test_links_of_a_hugging_face_cache_are_followed(models, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "revision"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(models[0].iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert answer(models[0], tmp_path / "kv")[1] == 0
    assert answer(snapshot, tmp_path / "kv")[1] == 99


def test_nothing_of_a_load_stays_open(models, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with LLM(models[0], kv_cache=KvCacheConfig(max_tokens=64)) as llm:
        weights = str(models[0] / WEIGHTS)  # other tests of this process may map theirs
        assert weights not in Path("/proc/self/maps").read_text()
        links = [str(link.resolve()) for link in Path("/proc/self/fd").iterdir()]
        assert not any(str(models[0]) in link for link in links)
        assert llm.tokenizer is not None
    assert not list(tmp_path.iterdir())


def test_a_named_revision_stands_for_the_weights_until_it_changes(models, tmp_path):
    store = tmp_path / "kv"
    assert answer(models[0], store, model_revision="a@1")[1] == 0
    assert answer(models[0], store)[1] == 0
    assert answer(models[0], store, model_revision="a@1")[1] == 99
    assert answer(models[1], store, model_revision="a@2") == answer(models[1])


def test_a_revision_that_names_nothing_is_refused_before_anything_is_loaded(models, when_loaded):
    when_loaded(lambda: pytest.fail("was loaded"))
    with pytest.raises(ConfigurationError, match="model_revision: '' must be a non-empty string"):
        LLM(models[0], model_revision="")
