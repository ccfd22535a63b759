"""Models by name, out of a local Hugging Face cache laid out as huggingface_hub does."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from kvconnect import LLM, KvCacheConfig, SamplingParams
from kvconnect.errors import ConfigurationError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = KvCacheConfig(max_tokens=256)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache. Whoever opens a connection fails, also where the network would answer."""

    def refuse(*address):
        raise AssertionError(f"a connection to {address}")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tmp_path / "hub"


def download(cache: Path, name: str, model: Path, *, branch: str | None = "main") -> Path:
    """What a download of `model` as `name` leaves: blobs, a snapshot of links to them, a branch."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    if branch:
        (repository / "refs").mkdir()
        (repository / "refs" / branch).write_text(COMMIT)
    return snapshot


def test_a_name_finds_what_was_downloaded(cache, llama):
    download(cache, "org/name", llama)
    prompt = "Once upon a time"
    with LLM("org/name", kv_cache=SMALL) as named, LLM(llama, kv_cache=SMALL) as direct:
        found, expected = (
            one.generate(prompt, SamplingParams(max_tokens=8))[0] for one in (named, direct)
        )
        assert found.output_token_ids == expected.output_token_ids
        assert named._intake._digest == direct._intake._digest


def test_a_name_without_an_organisation(cache, llama):
    download(cache, "gpt2", llama)
    with LLM("gpt2", kv_cache=SMALL) as llm:
        assert llm.generate([1], SamplingParams(max_tokens=1))


def test_a_directory_goes_before_a_name(cache, llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(llama, tmp_path / "org" / "name")
    with LLM("org/name", kv_cache=SMALL) as llm:
        assert llm.generate([1], SamplingParams(max_tokens=1))


def test_what_is_not_there_is_not_downloaded_and_what_is_there_is_said(cache, llama):
    download(cache, "org/one", llama)
    download(cache, "two", llama)
    with pytest.raises(ConfigurationError) as caught:
        LLM("org/name")
    message = str(caught.value)
    assert "model: 'org/name' is not a directory, and not in the Hugging Face cache" in message
    assert f"{cache} has org/one, two. " in message
    assert "Nothing is downloaded here: `hf download org/name` does" in message


def test_an_empty_cache(cache):
    with pytest.raises(ConfigurationError, match="has no models"):
        LLM("org/name")


def test_a_cache_that_is_a_file(cache):
    cache.write_text("no directory")
    with pytest.raises(ConfigurationError, match="'org/name' is not a directory, and"):
        LLM("org/name")


def test_a_long_cache_is_cut_short(cache, llama):
    for number in range(12):
        (cache / f"models--org--m{number:02}").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=r"org/m09 and 2 more\."):
        LLM("org/name")


def test_a_download_of_another_revision_only(cache, llama):
    snapshot = download(cache, "org/name", llama, branch=None)
    with pytest.raises(ConfigurationError, match=f"has no branch 'main' of it.*{snapshot}"):
        LLM("org/name")


def test_a_download_that_was_broken_off(cache, llama):
    snapshot = download(cache, "org/name", llama)
    (snapshot / "config.json").unlink()
    with pytest.raises(ConfigurationError, match="only partly in the Hugging Face cache"):
        LLM("org/name")


@pytest.mark.parametrize("name", ["org/name/more", "a b", "./nowhere", "org//name", "..", ""])
def test_what_is_no_name_is_a_directory_that_is_not_there(cache, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"is not a directory|config"):
        LLM(name)
