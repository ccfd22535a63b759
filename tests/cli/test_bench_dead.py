"""bench dead: what it refuses, and how it shows what it measured (tests/e2e has the measuring)."""

from __future__ import annotations

from kvconnect_bench.dead.run import Toll, figures_of


def test_each_target_stands_beside_its_figure():
    toll = Toll(
        alive=(0.001,),
        first=0.021,
        waiting=(),
        opened=(0.0002, 0.0004, 0.0003),
        control=(0.0001,),
        until_open=6.0,
        until_hit=2.0,
    )
    shown = {one.name: one for one in figures_of("redis, frozen", toll, budget_ms=20)}
    first = shown["redis, frozen: first request"]
    assert (first.value, first.target) == (21.0, "<= 20 + a miss")
    opened = shown["redis, frozen: then, median"]
    assert (round(opened.value, 6), opened.target) == (0.3, "< 1")
    assert shown["redis, frozen: until a hit after recovery"].target == "<= 10"
