"""The scripts that measure on a GPU: slices end in time, and what was measured is kept."""

from __future__ import annotations

import json
import os

import run
import tables
from slices import SLICES, Step

MINUTES = 9


def test_each_slice_fits_its_time():
    for number, steps in SLICES.items():
        assert sum(step.limit_s for step in steps) <= MINUTES * 60, f"slice {number}"


def test_a_step_that_hangs_is_ended_and_its_output_kept(monkeypatch, tmp_path):
    step = Step("hangs", ("-c", "import time; print('so far', flush=True); time.sleep(600)"), 600)
    gave = run.run_step(step, dict(os.environ), 2, has_cuda=False)
    assert (gave["exit"], gave["output"]) == ("ended after 2 s", "so far\n")


def test_what_was_measured_is_a_whole_file_after_each_step(tmp_path):
    path = tmp_path / "slice-1.json"
    results = run.Results(path, {"slice": 1})
    assert json.loads(path.read_text())["steps"] == []
    results.add({"step": "one"})
    assert json.loads(path.read_text())["steps"] == [{"step": "one"}]
    assert list(tmp_path.iterdir()) == [path]


def test_tables_show_what_ran_what_was_skipped_and_what_was_measured():
    figure = {"name": "memcpy", "value": 22.25, "unit": "GB/s", "target": ">= 20"}
    found = {
        "slice": 2,
        "date": "2026-11-24T08:00:00+00:00",
        "device": "a GPU",
        "torch": "2.11.0",
        "python": "3.12.3",
        "cores": 16,
        "steps": [
            {"step": "sanitizer", "skipped": "no CUDA device"},
            {
                "step": "tests",
                "exit": 1,
                "seconds": 3.5,
                "command": "python -m pytest",
                "tests": {"ran": 5, "failed": ["a::b"], "skipped": 1},
            },
            {
                "step": "bench",
                "exit": 0,
                "seconds": 2,
                "command": "python -m kvconnect bench",
                "figures": [{"benchmark": "kernels", "figures": [figure]}],
            },
        ],
    }
    text = "\n".join(tables.table(found))
    assert "Slice 2, 2026-11-24, a GPU, torch 2.11.0, Python 3.12.3, 16 cores:" in text
    assert "| sanitizer | not run: no CUDA device | |" in text
    assert "| tests | 3 passed, 1 failed, 1 skipped | 3.5 s |" in text
    assert "`kvconnect bench`: kernels" in text
    assert "| memcpy | 22.250 GB/s | >= 20 |" in text
