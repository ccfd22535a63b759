"""The cadence of connector calls on ranks that are processes: each is called as a rank alone is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import rank_engine as rank
from bench_engine import LAYERS, T
from job import Job
from rank_engine import PROMPT, expected, parts

LEADER_ONLY = {
    "on_new_request": 1,
    "get_num_new_matched_tokens": 1,
    "update_state_after_alloc": 1,
    "build_connector_meta": 8,
    "request_finished": 1,
}
EVERY_RANK = {
    "register_kv_caches": 1,
    "bind_connector_meta": 8,
    "start_load_kv": 8,
    "wait_for_layer_load": 8 * LAYERS,
    "save_kv_layer": 8 * LAYERS,
    "wait_for_save": 8,
    "get_finished": 8,
}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_simple(tmp_path: Path, size: int) -> None:
    ranks = parts(size)
    with Job(size, tmp_path) as job:
        job(rank.attach_recorder, ranks, {})
        assert job(rank.answer, PROMPT, 8)[0] == (expected(PROMPT, 8, ranks), 0)
        seen = [Counter(call[0] for call in calls) for calls in job(rank.calls)]
    assert dict(seen[0]) == EVERY_RANK | LEADER_ONLY
    assert [dict(one) for one in seen[1:]] == [EVERY_RANK] * (size - 1)


def test_a_load_is_over_when_the_last_rank_reports_it(tmp_path: Path) -> None:
    with Job(2, tmp_path) as job:
        job(rank.attach_recorder, parts(2), {})
        job(rank.script, {"match": (2 * T, True), "finished": ([], [])})
        [request] = job(rank.submit, PROMPT, 1, ranks=[0])
        assert job(rank.step)[0][0].loaded == {}
        job(rank.script, {"finished": ([], [request])}, ranks=[0])
        assert job(rank.step)[0][0].loaded == {}
        job(rank.script, {"finished": ([], [])}, ranks=[0])
        assert job(rank.step)[0][0].loaded == {}
        assert job(rank.calls, "wait_for_save") == [[], []]  # nothing was computed so far
        job(rank.script, {"finished": ([], [request])}, ranks=[1])
        assert job(rank.step)[0][0].loaded == {request: 2 * T}
        first, *others = zip(*job(rank.calls, "get_finished"), strict=True)
        assert first == (("get_finished", [], [request]),) * 2
        assert others == [(("get_finished", [], []),) * 2] * 3
        job(rank.script, {"finished": ([], [])})
        job(rank.drain)
