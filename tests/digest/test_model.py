"""The digest of a model directory differs whenever its weights or its configuration do."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from file_plants import flip_byte

from kvconnect.digest import model as digest
from kvconnect.digest import model_digest
from kvconnect.digest.content import content_digests
from kvconnect.errors import ConfigurationError


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


def test_one_flipped_bit_changes_it_also_behind_an_old_mtime(model: Path, digest_of):
    before = digest_of(model)
    flip_byte(model / "model-2.safetensors")
    assert digest_of(model) != before


def test_the_configuration_counts_but_not_who_wrote_it(model: Path, digest_of):
    before = digest_of(model)
    config = model / "config.json"
    config.write_text(json.dumps({"transformers_version": "9", "hidden_size": 64}))
    assert digest_of(model) == before
    config.write_text(json.dumps({"hidden_size": 64, "rope_theta": 5}))
    assert digest_of(model) != before


def test_the_digest_of_contents_is_cached(model: Path, digest_of, settled, monkeypatch, tmp_path):
    """Also by another name, and of files that are not loaded."""
    (model / "weights.npz").write_bytes(b"beside")
    before = digest_of(model)
    (tmp_path / "other").symlink_to(model)
    monkeypatch.setattr(digest, "content_digests", lambda _: pytest.fail("was read again"))
    assert digest_of(model) == digest_of(tmp_path / "other") == before


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


def test_a_user_without_a_home_has_no_cache(model: Path, digest_of, monkeypatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("kvconnect.digest.cache.cache_directory", homeless)
    assert model_digest(model) == digest_of(model)


def test_the_cache_is_where_the_user_keeps_caches(model: Path, settled, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model_digest(model)
    assert [file.name for file in (tmp_path / "kvconnect").iterdir()] == ["model-digests"]


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
    ("name", "content", "complaint"),
    [
        ("config.json", None, "has no config.json"),
        ("model-*.safetensors", None, "has no weight files"),
        ("config.json", "{", "is not JSON"),
        ("config.json", "[1]", "is not a JSON object"),
        ("", None, "model' is not a directory"),
    ],
)
def test_a_directory_that_is_no_model_is_refused(model: Path, digest_of, name, content, complaint):
    for file in model.glob(name or "*"):
        file.unlink() if content is None else file.write_text(content)
    if not name:
        model.rmdir()
    with pytest.raises(ConfigurationError, match=complaint):
        digest_of(model)
