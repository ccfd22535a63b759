"""docs/engines.md says what snapshots of states cost beside the keys and values of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvconnect.layout import KvCacheLayout, StateTensor

_PAGE = Path(__file__).parents[2] / "docs/engines.md"
PROMPT = 128 * 1024
T = 64


@dataclass(frozen=True)
class Shape:
    """A published model: bytes of one token's keys and values, and of one snapshot."""

    attention: tuple[int, int, int, int]  # layers, heads, dim of keys, of values
    mixers: int
    states: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # of one layer

    def nbytes(self, interval: int) -> tuple[int, int]:
        """Of a prompt: its keys and values, and its snapshots."""
        layers, heads, key_dim, value_dim = self.attention
        cached = KvCacheLayout(
            num_layers=layers,
            num_kv_heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            tokens_per_block=T,
            dtype=torch.bfloat16,
        )
        tensors = [
            StateTensor(layers + layer, f"state{number}", shape, dtype)
            for layer in range(self.mixers)
            for number, (shape, dtype) in enumerate(self.states)
        ]
        snapshot = KvCacheLayout.of_states(tensors, T)
        return PROMPT // T * cached.block_nbytes, PROMPT // interval * snapshot.block_nbytes


SHAPES = {
    "Qwen3-Next-80B-A3B": Shape(
        (12, 2, 256, 256),
        36,
        (((8192, 4), torch.bfloat16), ((32, 128, 128), torch.float32)),
    ),
    "Granite-4.0-H-Small": Shape(
        (4, 8, 128, 128),
        36,
        (((8448, 4), torch.bfloat16), ((128, 64, 128), torch.bfloat16)),
    ),
    "LFM2-2.6B": Shape((8, 8, 64, 64), 22, (((2048, 3), torch.bfloat16),)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_page_has_the_cost(name):
    ratios = []
    for interval in (1024, 4096, 16_384):
        cached, snapshots = SHAPES[name].nbytes(interval)
        ratios.append(f"{1 + snapshots / cached:.2f}")
    assert f"| {name} | {' | '.join(ratios)} |" in _PAGE.read_text(encoding="utf-8")


def test_short_convolutions_cost_little_at_the_default_interval():
    cached, snapshots = SHAPES["LFM2-2.6B"].nbytes(1024)
    assert cached + snapshots < 1.3 * cached


@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B"])
def test_large_states_cost_little_at_sixteen_times_the_default(name):
    cached, snapshots = SHAPES[name].nbytes(16_384)
    assert cached + snapshots < 1.3 * cached
