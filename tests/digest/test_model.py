"""The digest of a model directory differs whenever its weights or its configuration do."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from kvconnect.digest import model as digest
from kvconnect.digest import model_digest
from kvconnect.digest.content import content_digests
from kvconnect.errors import ConfigurationError, ModelChanged

LAYER_NORM = 131_268_608  # where a digest of stripes once looked past
PINNED = "d9a2c1de7cee10c143c405113e7afa8e2cbc63ec149c5b16e597da1bf11ecdbc"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"hidden_size": 64}))
    (directory / "model-1.safetensors").write_bytes(random.Random(1).randbytes(5000))
    (directory / "model-2.safetensors").write_bytes(random.Random(2).randbytes(5000))
    (directory / "model.safetensors.index.json").write_text("{}")
    return directory


@pytest.fixture
def digest_of(tmp_path: Path):
    return lambda directory: model_digest(directory, cache_dir=tmp_path / "cache")


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes files that were made just now for files that have been there for long."""
    monkeypatch.setattr(digest, "_SETTLED_NS", -(10**18))


def test_a_copy_has_the_same_digest(model: Path, digest_of, tmp_path: Path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert digest_of(copy) == digest_of(model)


def test_one_flipped_bit_changes_it_also_behind_an_old_mtime(model: Path, digest_of):
    before = digest_of(model)
    file = model / "model-2.safetensors"
    stat = file.stat()
    data = bytearray(file.read_bytes())
    data[4321] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digest_of(model) != before


def test_swapped_names_change_it(model: Path, digest_of):
    before = digest_of(model)
    (model / "model-1.safetensors").rename(model / "x")
    (model / "model-2.safetensors").rename(model / "model-1.safetensors")
    (model / "x").rename(model / "model-2.safetensors")
    assert digest_of(model) != before


def test_the_configuration_counts_but_not_who_wrote_it(model: Path, digest_of):
    before = digest_of(model)
    config = model / "config.json"
    config.write_text(json.dumps({"transformers_version": "9", "hidden_size": 64}))
    assert digest_of(model) == before
    config.write_text(json.dumps({"hidden_size": 64, "rope_theta": 5}))
    assert digest_of(model) != before


def test_the_digest_of_contents_is_cached(model: Path, digest_of, settled, monkeypatch):
    before = digest_of(model)
    monkeypatch.setattr(digest, "content_digests", lambda _: pytest.fail("was read again"))
    assert digest_of(model) == before


def test_another_name_of_a_file_is_not_read_again(
    model: Path, digest_of, settled, monkeypatch, tmp_path
):
    before = digest_of(model)
    (tmp_path / "other").symlink_to(model)
    monkeypatch.setattr(digest, "content_digests", lambda _: pytest.fail("was read again"))
    assert digest_of(tmp_path / "other") == before


def test_a_file_that_changed_a_moment_ago_is_read_again(model: Path, digest_of, tmp_path: Path):
    digest_of(model)
    assert not (tmp_path / "cache").exists()


def test_what_was_cached_does_not_count_for_what_is_written_later(
    model: Path, digest_of, settled, tmp_path
):
    before = digest_of(model)
    assert (tmp_path / "cache").exists()
    file = model / "model-1.safetensors"
    stat = file.stat()
    with file.open("r+b") as written:
        written.write(b"other weights")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digest_of(model) != before


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    model: Path, settled, tmp_path: Path
):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert model_digest(model, cache_dir=blocked) == model_digest(model, cache_dir=tmp_path / "c")


def test_a_user_without_a_home_has_no_cache(model: Path, digest_of, monkeypatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("kvconnect.digest.cache.cache_directory", homeless)
    assert model_digest(model) == digest_of(model)


def test_the_cache_is_where_the_user_keeps_caches(model: Path, settled, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model_digest(model)
    assert [file.name for file in (tmp_path / "kvconnect").iterdir()] == ["model-digests"]


def test_large_models_that_differ_in_one_layer_norm_have_different_digests(tmp_path: Path):
    digests = set()
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        with (directory / "model.safetensors").open("wb") as file:
            file.truncate(300 << 20)  # of which nothing is on the disk
            file.seek(LAYER_NORM)
            file.write(bytes([number]) * 4096)
        digests.add(model_digest(directory, cache_dir=tmp_path / "cache"))
    assert len(digests) == 2


def test_digests_of_models_of_small_files_stay_as_they_are(model: Path, digest_of):
    # Keys of stores that were written by earlier releases.
    assert digest_of(model).hex() == PINNED


def test_weights_that_the_configuration_names_are_read(model: Path, digest_of):
    (model / "sub").mkdir()
    (model / "sub" / "mine.safetensors").write_bytes(b"mine")
    settings = {"transformers_weights": "sub/mine.safetensors"}
    (model / "config.json").write_text(json.dumps(settings))
    before = digest_of(model)
    (model / "sub" / "mine.safetensors").write_bytes(b"yours")
    assert digest_of(model) != before


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_counts_with_its_scale(model: Path, digest_of, name):
    (model / "model.safetensors").write_bytes(b"whole")
    (model / "adapter_config.json").write_text('{"lora_alpha": 8}')
    (model / "adapter_model.safetensors").write_bytes(b"adapter")
    before = digest_of(model)
    (model / name).write_text('{"lora_alpha": 9}')
    assert digest_of(model) != before


def test_a_named_revision_stands_for_the_weights(model: Path, digest_of):
    named = model_digest(model, revision="org/name@1")
    assert named != digest_of(model)
    assert named != model_digest(model, revision="org/name@2")
    (model / "model-1.safetensors").write_bytes(b"other")
    assert model_digest(model, revision="org/name@1") == named
    (model / "config.json").write_text(json.dumps({"hidden_size": 65}))
    assert model_digest(model, revision="org/name@1") != named


@pytest.mark.parametrize("revision", ["", " ", 3, b"x"])
def test_a_revision_that_names_nothing_is_refused(model: Path, revision):
    with pytest.raises(ConfigurationError, match=r"model_revision: .* must be a non-empty string"):
        model_digest(model, revision=revision)


def test_a_file_that_is_written_to_while_it_is_read_is_refused(model: Path, digest_of, monkeypatch):
    file = model / "model-2.safetensors"
    stat = file.stat()

    def interrupted(contents):
        digests = content_digests(contents)
        with file.open("r+b") as written:
            written.write(b"other")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return digests

    monkeypatch.setattr(digest, "content_digests", interrupted)
    with pytest.raises(ModelChanged, match=r"model-2.safetensors' changed while it was loaded"):
        digest_of(model)


def test_a_log_that_grows_meanwhile_is_no_reason_to_refuse(model: Path, digest_of, monkeypatch):
    (model / "train.log").write_text("")
    before = digest_of(model)

    def interrupted(contents):
        (model / "train.log").write_text("step 2")
        (model / "later.json").write_text("{}")
        return content_digests(contents)

    monkeypatch.setattr(digest, "content_digests", interrupted)
    assert digest_of(model) == before


def test_a_pipe_in_the_directory_is_left_alone(model: Path, digest_of):
    before = digest_of(model)
    os.mkfifo(model / "pipe.json")
    os.mkfifo(model / "model.safetensors")
    assert digest_of(model) == before


@pytest.mark.parametrize(
    ("remove", "complaint"),
    [
        ("config.json", "has no config.json"),
        ("model*.safetensors", "has no weight files"),
    ],
)
def test_a_directory_that_is_no_model_is_refused(model: Path, digest_of, remove, complaint):
    for file in list(model.glob(remove)):
        file.unlink()
    with pytest.raises(ConfigurationError, match=complaint):
        digest_of(model)


def test_a_missing_directory_is_named(tmp_path: Path, digest_of):
    with pytest.raises(ConfigurationError, match="nowhere' is not a directory"):
        digest_of(tmp_path / "nowhere")


def test_a_broken_configuration_is_named(model: Path, digest_of):
    (model / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="is not JSON"):
        digest_of(model)


def test_a_configuration_that_is_no_object_is_named(model: Path, digest_of):
    (model / "config.json").write_text("[1]")
    with pytest.raises(ConfigurationError, match="is not a JSON object"):
        digest_of(model)
