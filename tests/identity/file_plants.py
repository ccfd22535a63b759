"""Files of a model's directory, planted alike in every engine that reads it: one table for all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from model_directories import index, pickled, tensors
from safetensors.torch import save_file

Content = bytes | Mapping[str, object]
"""Of a file; settings are merged into those that it has."""

OLD, NEW = tensors("a", seed=1), tensors("a", seed=7)
INDEX = "model.safetensors.index.json"
SHARDS = {"model-1.safetensors": OLD, "model-2.safetensors": tensors("a", seed=2)}


class FilePlant(NamedTuple):
    """A file that changes, and what lies beside it before; `row` is the table's."""

    row: str
    changed: str
    into: Content
    beside: Mapping[str, Content] = {}

    def prepare(self, directory: Path) -> None:
        """Writes what lies beside the directory's files before the change."""
        for name, content in self.beside.items():
            alter(directory, name, content)

    def change(self, directory: Path) -> None:
        """Changes the file."""
        alter(directory, self.changed, self.into)


FILE_PLANTS = (
    FilePlant("other-model", "model.safetensors", NEW),
    FilePlant("config-changed", "config.json", {"rope_theta": 5.0}),
    FilePlant(
        "file-beside-index",
        "model-1.safetensors",
        NEW,
        SHARDS | {INDEX: index(a="model-1.safetensors")},
    ),
    FilePlant(
        "index-changed",
        INDEX,
        index(a="model-2.safetensors"),
        SHARDS | {INDEX: index(a="model-1.safetensors")},
    ),
    FilePlant(
        "transformers-weights",
        "other.safetensors",
        NEW,
        {"other.safetensors": OLD, "config.json": {"transformers_weights": "other.safetensors"}},
    ),
    *(
        FilePlant(row, name, NEW, {name: OLD})
        for row, name in (
            ("consolidated-beside-hf", "consolidated.safetensors"),
            ("variant", "model.fp16.safetensors"),
            ("subfolder", "text/model.safetensors"),
        )
    ),
    *(
        FilePlant(row, name, pickled(7), {name: pickled(1)})
        for row, name in (
            ("bin-beside-safetensors", "pytorch_model.bin"),
            ("pt-beside", "model.pt"),
            ("pt-beside", "consolidated.00.pth"),
            ("gguf-beside", "model.gguf"),
            ("npz-beside", "model.npz"),
        )
    ),
    FilePlant(
        "params-json",
        "params.json",
        {"rope_theta": 2.0},
        {"params.json": {"rope_theta": 1.0}, "consolidated.safetensors": OLD},
    ),
    FilePlant(
        "quantize-config",
        "quantize_config.json",
        {"bits": 8},
        {"quantize_config.json": {"bits": 4}},
    ),
    FilePlant(
        "adapter-in-directory",
        "adapter_model.safetensors",
        NEW,
        {"adapter_config.json": {"r": 8}, "adapter_model.safetensors": OLD},
    ),
)


def file_plants(column: str, outcome: str) -> list[Any]:
    """Returns the table as cases of a test that plants them in `column`."""
    return [
        pytest.param(
            plant,
            id=f"{plant.row}-{plant.changed}",
            marks=pytest.mark.planted(plant.row, column, outcome),
        )
        for plant in FILE_PLANTS
    ]


def put(directory: Path, name: str, content: Content | float) -> None:
    """Writes a file of the model's; numbers stand for weights."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, Mapping):
        path.write_text(json.dumps(content), encoding="utf-8")
    elif name.endswith(".safetensors"):
        save_file({"w": torch.full((8,), float(content))}, path)
    else:
        path.write_bytes(f"weights {content}".encode())


def flip_byte(path: Path) -> None:
    """Changes the last byte of a file, whose size and mtime stay."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def alter(directory: Path, name: str, content: Content) -> None:
    """Writes a file; settings are merged into those that it has."""
    path = directory / name
    if isinstance(content, Mapping) and path.exists():
        content = json.loads(path.read_text()) | dict(content)
    put(directory, name, content)
