"""An engine whose layers see no further back than their window, over several pools.

The "KV" of a position is a checksum over its token and the KV that its layer may see, as read from
the pools; the next token is one over what all layers see.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import bench_engine
import numpy as np
import torch
from bench_engine import BenchEngine, T, computed
from bench_kv import GARBAGE, GroupKv, Layouts
from bench_rank import BenchModel, Share
from torch import Tensor

from kvconnect.backend import Backend
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest

__all__ = ["GARBAGE", "GroupKv", "Layouts", "WindowEngine", "llm_args", "plain_run", "reference"]


def layout(window: int | None, *layers: int, head_dim: int = 1) -> KvCacheLayout:
    return KvCacheLayout(len(layers), 1, head_dim, head_dim, T, torch.float64, window, layers)


# Frames of 4 and 20 KiB; the layers of the groups alternate as in Gemma3.
FULL_AND_WINDOW = (layout(None, 2, 5), layout(10, 0, 1, 3, 4, head_dim=64))
TWO_WINDOWS = (layout(None, 1, head_dim=64), layout(13, 0, 3), layout(6, 2))
WINDOW_ONLY = (layout(10, 0, 1),)
TWO_SHAPES = (layout(None, 0, 2), layout(None, 1, head_dim=3))
PLAIN = (layout(None, 0, 1, 2),)
ALL_LAYOUTS = (FULL_AND_WINDOW, TWO_WINDOWS, WINDOW_ONLY, TWO_SHAPES)


class WindowModel(BenchModel):
    """The layers of `layouts`, and their KV in the pools of `kv`."""

    def __init__(self, kv: GroupKv) -> None:
        self.groups = kv
        self.num_layers = sum(one.num_layers for one in kv.layouts)

    def compute(self, share: Share, place: int) -> None:
        planes, ids, window = self._layer(share, place)
        for position in range(share.first, min(share.end, len(share.tokens))):
            seen = _visible(planes, ids, window, position)
            text = f"{share.tokens[position]} {place}".encode()
            planes[ids[position // T], :, position % T] = float(zlib.crc32(seen + text))

    def _digest(self, share: Share) -> int:
        state = 0
        for layer in range(self.num_layers):
            state = zlib.crc32(_visible(*self._layer(share, layer), len(share.tokens)), state)
        return state

    def _layer(self, share: Share, layer: int) -> tuple[np.ndarray, list[int], int | None]:
        layouts = self.groups.layouts
        group = next(g for g, one in enumerate(layouts) if layer in one.layer_numbers)
        buffers = self.groups.get_buffers(layer)
        assert isinstance(buffers, Tensor)
        return buffers.numpy(), share.blocks[group], layouts[group].window


def _visible(planes: np.ndarray, ids: list[int], window: int | None, position: int) -> bytes:
    """What a layer sees of the KV before `position`."""
    first = 0 if window is None else max(0, position - window + 1)
    numbers = np.arange(first, position)
    blocks = np.array(ids, np.int64)[numbers // T] if first < position else numbers
    assert (blocks >= 0).all(), "the window needs a block that was given up"
    return planes[blocks, :, numbers % T].tobytes()


class WindowEngine(BenchEngine):
    """A `BenchEngine` over a `GroupKv`."""

    def __init__(self, args: LlmArgs, *, kv: GroupKv | None = None, chunk: int = 1000) -> None:
        kv = kv or GroupKv(args.layouts)
        super().__init__(args, kv=kv, model=WindowModel(kv), chunk=chunk)


def llm_args(
    store: str | Backend | KvCacheConnectorConfig, layouts: Layouts, **settings: object
) -> LlmArgs:
    """What a connector for `layouts` is built with."""
    return bench_engine.llm_args(store, layouts, **settings)


def plain_run(
    prompt: Sequence[int], layouts: Layouts, max_tokens: int = 1
) -> tuple[LlmRequest, GroupKv]:
    """`prompt` answered without any connector, and where its KV is."""
    kv = GroupKv(layouts, 256)
    return computed(prompt, kv, WindowModel(kv), max_tokens), kv


def reference(prompt: Sequence[int], layouts: Layouts, max_tokens: int = 1) -> list[int]:
    """The answer without any connector."""
    request, _ = plain_run(prompt, layouts, max_tokens)
    return request.tokens.view[len(prompt) :].tolist()
