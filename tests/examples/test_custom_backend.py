"""``examples/custom_backend.py`` runs, and its backend keeps the contract."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kvconnect.backend import StoredBlock
from kvconnect.keys import BlockKey

EXAMPLE = "custom_backend"
KEYS = [BlockKey(bytes([number]) * 32) for number in range(3)]


@pytest.fixture
def blocks() -> list[StoredBlock]:
    return [
        StoredBlock(key, torch.full((4096,), index + 1, dtype=torch.uint8))
        for index, key in enumerate(KEYS)
    ]


def buffers(size: int = 4096) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.uint8) for _ in KEYS]


def test_the_example_runs_and_the_second_engine_finds_the_blocks(
    example, model: Path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["custom_backend.py", str(model)])
    example.main()
    first, second = capsys.readouterr().out.splitlines()
    assert "352 prompt tokens, 0 from the folder, 352 computed" in first
    assert "352 prompt tokens, 351 from the folder, 1 computed" in second


async def test_what_was_saved_comes_back(example, blocks, tmp_path: Path):
    backend = example.FolderBackend(tmp_path)
    assert await backend.save(blocks) == 3
    assert await backend.lookup(KEYS) == 3
    into = buffers()
    assert await backend.load(KEYS, into) == 3
    assert all(torch.equal(found, block.data) for found, block in zip(into, blocks, strict=True))


async def test_a_missing_block_ends_the_run(example, blocks, tmp_path: Path):
    backend = example.FolderBackend(tmp_path)
    await backend.save([blocks[0], blocks[2]])
    assert await backend.lookup(KEYS) == 1
    assert await backend.load(KEYS, buffers()) == 1


@pytest.mark.parametrize("size", [4095, 4097])
async def test_a_value_of_another_length_is_a_miss(example, blocks, tmp_path: Path, size):
    backend = example.FolderBackend(tmp_path)
    await backend.save(blocks)
    assert await backend.load(KEYS, buffers(size)) == 0


async def test_a_deleted_block_is_gone_and_deleting_it_again_is_no_error(
    example, blocks, tmp_path: Path
):
    backend = example.FolderBackend(tmp_path)
    await backend.save(blocks)
    await backend.delete(KEYS[:1])
    await backend.delete(KEYS[:1])
    assert await backend.lookup(KEYS) == 0
    assert await backend.lookup(KEYS[1:]) == 2
