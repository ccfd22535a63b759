"""``kvconnect bench identity``: what it refuses, and what it measures."""

from __future__ import annotations

import json

import pytest

from kvconnect.bench.identity.plan import PARTS
from kvconnect.bench.identity.run import MEASURES
from kvconnect.cli.main import main


def test_each_part_has_a_measure():
    assert tuple(MEASURES) == PARTS


@pytest.mark.parametrize(
    ("options", "complaint"),
    [(["--parts", "canari"], "canary"), (["--repeats", "0"], "--repeats 0")],
)
def test_wrong_options_are_refused(options, complaint, capsys):
    assert main(["bench", "identity", *options]) != 0
    assert complaint in capsys.readouterr().err


def test_all_parts_are_measured(llama, capsys):
    options = ["--model", str(llama), "--repeats", "1", "--prompt-tokens", "20", "--json"]
    assert main(["bench", "identity", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [figure["name"] for figure in found["figures"] if figure["target"]]
    assert names == ["content hash / loading", "name / loading", "per prefill / decode step"]
    assert all(figure["value"] > 0 for figure in found["figures"])
