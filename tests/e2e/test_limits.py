"""A store that is too small or gone: the same answer."""

from __future__ import annotations

import shutil
from pathlib import Path

from harness import PARAMS, PROMPT, answer, disk_url, open_llm


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
