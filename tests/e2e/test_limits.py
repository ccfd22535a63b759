"""A store that is full, read-only or gone: the same answer, and a warning."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import PARAMS, PROMPT, answer, disk_url, open_llm

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 512 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    _mount("-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path))
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def read_only(master_store: Path, tmp_path: Path) -> Iterator[Path]:
    """The filled store on a filesystem that is mounted read-only."""
    copy, path = tmp_path / "copy", tmp_path / "read-only"
    shutil.copytree(master_store, copy)
    path.mkdir()
    _mount("--bind", str(copy), str(path))
    _mount("-o", "remount,ro,bind", str(path))
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.root
@needs_root
def test_a_full_disk(
    model: Path, small_disk: Path, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    url = disk_url(small_disk / "store")  # believes that it may have 64 MiB
    with caplog.at_level(logging.WARNING, "kvconnect"):
        for _ in range(2):
            assert list(answer(model, url).output_token_ids) == expected
    assert "no space" in caplog.text.lower()


@pytest.mark.root
@needs_root
def test_a_read_only_directory_serves_what_it_has(
    model: Path, read_only: Path, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvconnect"):
        output = answer(model, disk_url(read_only))
    assert list(output.output_token_ids) == expected
    assert output.computed_tokens == 1
    assert "read-only" in caplog.text.lower()
    other = PROMPT[::-1]
    computed = answer(model, disk_url(read_only), prompt=other)
    assert computed.output_token_ids == answer(model, prompt=other).output_token_ids


def test_a_directory_that_vanishes(model: Path, tmp_path: Path, expected: list[int]) -> None:
    directory = tmp_path / "store"
    with open_llm(model, disk_url(directory)) as llm:
        assert list(llm.generate([PROMPT], PARAMS)[0].output_token_ids) == expected
        directory.rename(tmp_path / "gone")  # at once: the store may write to it meanwhile
        shutil.rmtree(tmp_path / "gone")
        for start in range(3):
            llm.generate([PROMPT[start:]], PARAMS)
        assert list(llm.generate([PROMPT], PARAMS)[0].output_token_ids) == expected
    assert list(answer(model, disk_url(directory)).output_token_ids) == expected


def test_a_capacity_smaller_than_the_prompt(
    model: Path, tmp_path: Path, expected: list[int]
) -> None:
    url = disk_url(tmp_path / "store", "128KiB")
    for _ in range(3):
        assert list(answer(model, url).output_token_ids) == expected
