"""Never a wrong token: whatever happened to the store, the answer is the one without a store."""

from __future__ import annotations

import random
import shutil
from itertools import product
from pathlib import Path

import pytest
from harness import PROMPT, answer, disk_url, store_files
from observed import slow


@pytest.fixture
def store(master_store: Path, tmp_path: Path) -> Path:
    """A copy of the filled store, to be damaged."""
    directory = tmp_path / "copy"
    shutil.copytree(master_store, directory)
    return directory


def flip(path: Path, rng: random.Random, count: int) -> None:
    """Flip one bit in each of `count` places."""
    data = bytearray(path.read_bytes())
    for _ in range(count):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        *[(0, 1), (1, 300)],
        *slow(*product(range(2, 40), (1, 300))),
    ],
)
def test_flipped_bits(model: Path, store: Path, expected: list[int], seed: int, count: int) -> None:
    rng = random.Random(seed)
    for path in store_files(store):
        if path.stat().st_size:
            flip(path, rng, count)
    assert list(answer(model, disk_url(store)).output_token_ids) == expected
    # What was damaged was dropped, computed and saved again.
    assert list(answer(model, disk_url(store)).output_token_ids) == expected


def test_a_flip_in_every_block_is_seen(model: Path, store: Path, expected: list[int]) -> None:
    for path in store_files(store):
        if path.stat().st_size and "sqlite" not in path.name and ".db" not in path.name:
            data = bytearray(path.read_bytes())
            data[2048::4096] = bytes(byte ^ 0x10 for byte in data[2048::4096])
            path.write_bytes(data)
    damaged = answer(model, disk_url(store))
    assert list(damaged.output_token_ids) == expected
    assert damaged.reused_store_tokens == 0
    healed = answer(model, disk_url(store))
    assert list(healed.output_token_ids) == expected
    assert healed.reused_store_tokens == len(PROMPT) - 1


def test_each_file_deleted_in_turn(
    model: Path, master_store: Path, expected: list[int], tmp_path: Path
) -> None:
    for number, path in enumerate(store_files(master_store)):
        directory = tmp_path / str(number)
        shutil.copytree(master_store, directory)
        (directory / path.relative_to(master_store)).unlink()
        assert list(answer(model, disk_url(directory)).output_token_ids) == expected, path
