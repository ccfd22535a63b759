"""A connector for TensorRT-LLM at work under the stand-in of its runtime."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import trtllm_interface as trt

T = 8
ROOM = "kvconnect.integrations.trtllm"
NEWER, OLDER = "connectors.kv_cache_connector", "kv_cache_connector"
"""Modules of TensorRT-LLM that have its abstract classes, in newer and older releases."""


def forget_classes() -> None:
    """Our classes are made anew, of other bases, when they are asked for next."""
    for name in [name for name in sys.modules if name.startswith(f"{ROOM}.")]:
        if name.rpartition(".")[2] in {"scheduler", "worker"}:
            del sys.modules[name]


class Pair:
    """A connector at work, over a pool of 32 blocks of two layers."""

    def __init__(
        self,
        classes: tuple[type, type],
        model: Path,
        *,
        kv_factor: int = 2,
        form: str = "1.2",
        window: int | None = None,
        **arguments: object,
    ) -> None:
        args = trt.llm_args(model, T, **arguments)
        self.scheduler, self.worker = (cls(args) for cls in classes)
        pool = torch.zeros(32, 2, kv_factor, T * 6, dtype=torch.float64)
        self.runtime = trt.Runtime(self.scheduler, self.worker, pool, T, form, window)

    def __enter__(self) -> trt.Runtime:
        return self.runtime

    def __exit__(self, *_: object) -> None:
        self.worker.shutdown()


def a_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 250, (length,), generator=generator).tolist()
