"""The digest of a model directory differs whenever its weights or its configuration do."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from kvconnect import digest
from kvconnect.digest import model_digest
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


def test_the_digest_of_contents_is_cached(model: Path, digest_of, monkeypatch):
    before = digest_of(model)
    monkeypatch.setattr(digest, "_content_digest", lambda *_: pytest.fail("was read again"))
    assert digest_of(model) == before


def test_a_damaged_cache_entry_is_not_believed(model: Path, tmp_path: Path, digest_of):
    before = digest_of(model)
    for entry in (tmp_path / "cache").iterdir():
        entry.write_bytes(b"short")
    assert digest_of(model) == before


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(model: Path, tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert model_digest(model, cache_dir=blocked) == model_digest(model, cache_dir=tmp_path / "c")


def test_large_files_are_sampled_at_the_same_places_every_time(
    model: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(digest, "_WHOLE", 1000)
    monkeypatch.setattr(digest, "_STRIPE", 100)
    monkeypatch.setattr(digest, "_STRIPES", 40)
    first = model_digest(model, cache_dir=tmp_path / "c1")
    assert model_digest(model, cache_dir=tmp_path / "c2") == first
    file = model / "model-1.safetensors"
    file.write_bytes(bytes(5000))
    assert model_digest(model, cache_dir=tmp_path / "c3") != first


def test_an_odd_size_has_its_end_among_the_samples(model: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(digest, "_WHOLE", 1000)
    monkeypatch.setattr(digest, "_STRIPE", 100)
    monkeypatch.setattr(digest, "_STRIPES", 5)
    file = model / "model-1.safetensors"
    data = bytearray(5050)
    file.write_bytes(data)
    before = model_digest(model, cache_dir=tmp_path / "c1")
    data[-1] = 1
    file.write_bytes(data)
    assert model_digest(model, cache_dir=tmp_path / "c2") != before


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
