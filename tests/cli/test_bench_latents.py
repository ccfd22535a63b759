"""The benchmark of attention over latents computes both ways."""

from __future__ import annotations

from kvconnect.engine.model.latents import Latents
from kvconnect_bench.latents import bench_latents


def test_both_ways_are_measured(monkeypatch):
    ways = []
    expanded = Latents.expanded
    absorbed = Latents.absorbed
    monkeypatch.setattr(Latents, "expanded", lambda *a: ways.append("expanded") or expanded(*a))
    monkeypatch.setattr(Latents, "absorbed", lambda *a: ways.append("absorbed") or absorbed(*a))
    figures = bench_latents([2, 64], [64], num_heads=2, rounds=1)
    assert [one.name.split(":")[0] for one in figures] == [
        "2 tokens up to 64",
        "64 tokens up to 64",
    ]
    assert [one.unit.split()[-1] for one in figures] == ["absorbed", "expanded"]
    assert min(one.value for one in figures) > 0
    # Before a chunk, and the chunk itself.
    assert ways == ["absorbed", "expanded", "expanded", "absorbed", "expanded"]
