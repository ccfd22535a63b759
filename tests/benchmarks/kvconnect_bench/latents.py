"""Measures attention over latents, absorbed and expanded, by turns: which one is the faster?

``python -m kvconnect_bench.latents`` computes chunks of a prompt in one layer of DeepSeek-V2-Lite's
shape. The engine takes the way with fewer products, see `Latents.pays_to_expand`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from kvconnect.bench.report import Figure, median_ratio, render
from kvconnect.engine.model.attention import Chunk
from kvconnect.engine.model.latents import Latents
from kvconnect.engine.model.pages import LayerPages
from kvconnect.engine.model.scores import AttentionInput
from kvconnect.layout import KvCacheLayout

_RANK, _ROPE, _NOPE, _VALUE = 512, 64, 128, 128
_BLOCK = 64


class _Layer(Latents):
    """Latents whose way to attend is set."""

    expands = False

    def pays_to_expand(self, count: int, end: int) -> bool:
        """Returns what was set."""
        return self.expands


def bench_latents(
    chunks: Sequence[int], ends: Sequence[int], *, num_heads: int = 16, rounds: int = 5
) -> list[Figure]:
    """Measures chunks of each length that end at each position.

    Args:
        chunks: lengths of chunks in tokens.
        ends: positions behind the chunks.
        num_heads: heads of the layer.
        rounds: the ratios are medians of so many.

    Returns:
        The time of the absorbed way as a multiple of the expanded one's, with the engine's choice.
    """
    layer = _Layer(_module(num_heads))
    figures = []
    for end in ends:
        pages = _pages(end)
        for count in (one for one in chunks if one <= end):
            given = _given(layer, num_heads, count)
            both: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(rounds):
                for layer.expands, seconds in both.items():
                    seconds.append(_seconds(given, pages, count, end))
            choice = "expanded" if Latents.pays_to_expand(layer, count, end) else "absorbed"
            figures.append(
                Figure(
                    f"{count} tokens up to {end}: absorbed to expanded",
                    median_ratio(both[False], both[True]),
                    f"times, the engine takes {choice}",
                )
            )
    return figures


def _module(num_heads: int) -> SimpleNamespace:
    """Returns the parts of DeepSeek's attention that latents need."""
    linear = torch.nn.Linear(_RANK, num_heads * (_NOPE + _VALUE), bias=False)

    def expand_kv(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        whole = linear(kv_nope[0]).view(1, -1, num_heads, _NOPE + _VALUE).transpose(1, 2)
        keys, values = whole.split([_NOPE, _VALUE], -1)
        return torch.cat((keys, k_rot.expand(-1, num_heads, -1, -1)), -1), values

    return SimpleNamespace(
        expand_kv=expand_kv,
        kv_b_proj=linear,
        kv_lora_rank=_RANK,
        qk_rope_head_dim=_ROPE,
        qk_nope_head_dim=_NOPE,
        v_head_dim=_VALUE,
    )


def _pages(end: int) -> LayerPages:
    layout = KvCacheLayout(
        num_layers=1,
        num_kv_heads=1,
        key_dim=_RANK + _ROPE,
        value_dim=0,
        tokens_per_block=_BLOCK,
        dtype=torch.float32,
    )
    keys = torch.randn(-(-end // _BLOCK), _BLOCK, 1, _RANK + _ROPE)
    return LayerPages((keys, keys[..., :0]), layout)


def _given(layer: Latents, num_heads: int, count: int) -> AttentionInput:
    query = torch.randn(1, num_heads, count, _NOPE + _ROPE)
    key = torch.randn(1, 1, count, _RANK + _ROPE)
    scaling = (_NOPE + _ROPE) ** -0.5
    return AttentionInput(query, key, key[..., :0], scaling, None, latents=layer)


def _seconds(given: AttentionInput, pages: LayerPages, count: int, end: int) -> float:
    rows = slice(0, count)
    table = np.arange(-(-end // _BLOCK))
    chunk = Chunk(rows, rows, end - count, table, _BLOCK, torch.device("cpu"))
    out = torch.empty(count, given.query.shape[1], _VALUE)
    began = time.perf_counter()
    with torch.inference_mode():
        chunk.attend(given, pages, out)
    return time.perf_counter() - began


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvconnect_bench.latents")
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 16, 64, 256, 1024])
    parser.add_argument("--ends", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    figures = bench_latents(given.chunks, given.ends, rounds=given.rounds)
    print(render("latents", figures, as_json=given.json))


if __name__ == "__main__":
    _main()
