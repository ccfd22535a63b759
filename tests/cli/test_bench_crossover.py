"""bench crossover: what it refuses, that it measures, and how it shows what it measured."""

from __future__ import annotations

import pytest

from kvconnect.cli.main import main
from kvconnect_bench.crossover.plan import Cell, Crossover, CrossoverPlan
from kvconnect_bench.crossover.run import crossover, figures_of


def test_each_target_stands_beside_its_figure():
    near = Cell(1, 0, 4096, 1, computed=1.0, loaded=1.4, ours=0.6)
    far = Cell(16, 50, 4096, 1, computed=1.0, loaded=0.2, ours=0.21)
    figures = figures_of(Crossover((near, far), shared=(2.0, 2.1), between=(0.010, 0.0104)))
    shown = {one.name: one for one in figures}
    ratio = shown["4096 tokens, 1 users, 0 ms, store / model 1: ours / the better one"]
    assert (ratio.value, ratio.target) == (0.6, "<= 0.65")
    ratio = shown["4096 tokens, 1 users, 50 ms, store / model 16: ours / the better one"]
    assert (round(ratio.value, 6), ratio.target) == (1.05, "<= 1.05")
    assert shown["users of one prefix: ours / computed"].value == 1.05
    assert round(shown["between tokens of others: ours / loaded"].value, 6) == 1.04


@pytest.mark.parametrize(
    ("option", "given", "wanted"),
    [
        ("--store-speeds", "1,x", "give numbers > 0"),
        ("--store-speeds", "0", "give numbers > 0"),
        ("--prompts", "32", "of at least 64"),
        ("--users", "0", "of at least 1"),
    ],
)
def test_refusals(option, given, wanted, capsys):
    assert main(["bench", "crossover", option, given]) == 2
    assert wanted in capsys.readouterr().err


def test_all_three_ways_are_measured(tmp_path):
    plan = CrossoverPlan(
        rates=(1,),
        first_byte_ms=(1,),
        prompts=(128,),
        users=(1, 2),
        users_prompt=96,
        prefix_users=3,
        prefix_tokens=128,
        repeats=1,
    )
    said: list[str] = []
    measured = crossover(None, tmp_path, plan, said.append)
    assert [(cell.prompt, cell.users) for cell in measured.cells] == [(128, 1), (96, 2)]
    assert all(min(cell.computed, cell.loaded, cell.ours) > 0 for cell in measured.cells)
    assert measured.shared is not None
    assert min(*measured.shared, *measured.between) > 0
