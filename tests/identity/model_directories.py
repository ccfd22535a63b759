"""Model directories as they are shipped, with files of a few bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

CONFIG = {"hidden_size": 64, "transformers_version": "9"}


def tensors(*names: str, seed: int = 0) -> bytes:
    """A safetensors file with one small tensor of each name."""
    header = {
        name: {"dtype": "U8", "shape": [16], "data_offsets": [16 * at, 16 * at + 16]}
        for at, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    content = random.Random(seed).randbytes(16 * len(names))
    return len(text).to_bytes(8, "little") + text + content


def index(**files: str) -> bytes:
    """An index: which file holds the tensor."""
    return json.dumps({"metadata": {"total_size": 32}, "weight_map": files}).encode()


def pickled(seed: int) -> bytes:
    """A file of torch's, as far as a digest goes."""
    return b"PK\3\4" + random.Random(seed).randbytes(40)


Files = Mapping[str, bytes]

_TOKENIZER = {
    "tokenizer.json": b"{}",
    "tokenizer.model": b"model",
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b"{}",
    "vocab.json": b"{}",
    "merges.txt": b"a b",
    "qwen.tiktoken": b"IQ== 0",
    "generation_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool.jinja": b"{{ tools }}",
    "preprocessor_config.json": b"{}",
    "README.md": b"# A model",
    ".gitattributes": b"*.safetensors filter=lfs",
}

SHARDS = {
    "model-00001-of-00002.safetensors": tensors("a", "b", seed=1),
    "model-00002-of-00002.safetensors": tensors("c", seed=2),
    "model.safetensors.index.json": index(
        a="model-00001-of-00002.safetensors",
        b="model-00001-of-00002.safetensors",
        c="model-00002-of-00002.safetensors",
    ),
}

ALONE: Mapping[str, Files] = {
    "safetensors": {"model.safetensors": tensors("a")} | _TOKENIZER,
    "index and shards": SHARDS | _TOKENIZER,
    "an index that names none": {
        "model-1.safetensors": tensors("a"),
        "model.safetensors.index.json": b"{}",
    },
    "bin": {"pytorch_model.bin": pickled(1)} | _TOKENIZER,
    "bin, index and shards": {
        "pytorch_model-00001-of-00002.bin": pickled(1),
        "pytorch_model-00002-of-00002.bin": pickled(2),
        "pytorch_model.bin.index.json": index(
            a="pytorch_model-00001-of-00002.bin", b="pytorch_model-00002-of-00002.bin"
        ),
    },
    "bin of a trainer": {
        "pytorch_model.bin": pickled(1),
        "training_args.bin": pickled(2),
        "optimizer.pt": pickled(3),
        "scheduler.pt": pickled(4),
        "rng_state_0.pth": pickled(5),
        "trainer_state.json": b"{}",
    },
    "gguf": {"model-q4.gguf": b"GGUF" + pickled(1)},
    "consolidated": {"consolidated.00.pth": pickled(1), "tokenizer.model": b"model"},
    "consolidated safetensors": {"consolidated.safetensors": tensors("a")},
    "adapter": {
        "model.safetensors": tensors("a"),
        "adapter_config.json": b'{"lora_alpha": 8}',
        "adapter_model.safetensors": tensors("lora_A", seed=3),
    },
    "adapter alone": {
        "adapter_model.safetensors": tensors("lora_A", seed=3),
        "adapter_model.bin": pickled(3),
    },
    "named by config.json": {
        "config.json": b'{"transformers_weights": "sub/mine.safetensors"}',
        "sub/mine.safetensors": tensors("a"),
    },
    "a folder of bin": {"weights/pytorch_model.bin": pickled(1)},
}
"""Directories that hold one loader's files alone: digests of theirs are those of release 1."""


def make(directory: Path, files: Files) -> Path:
    """Writes `files` and a config.json to `directory`."""
    for name, content in ({"config.json": json.dumps(CONFIG).encode()} | dict(files)).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return directory
