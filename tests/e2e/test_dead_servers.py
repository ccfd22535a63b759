"""Real servers that die under an engine: they cost the lookup budget once, and are used again."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconnect_bench.dead.run import DeadPlan, measure_death
from kvconnect_bench.servers.mortal import SERVERS, Death

BUDGET_S = 0.5
RECOVERY_S = 60.0
# Figures are the benchmark's (``kvconnect bench dead``), which also compares the answers. Here a
# store is soon found dead, but not so soon that it would pass for the budget.
PLAN = DeadPlan(
    requests=10,
    dead_s=0.0,
    budget_ms=1000 * BUDGET_S,
    timeout_s=5.0,
    parameters="timeout=2s",
    stored=25,
)


@pytest.mark.slow  # A short form is in test_dead_store.py.
@pytest.mark.parametrize("death", list(Death), ids=lambda death: death.value)
@pytest.mark.parametrize("name", list(SERVERS))
def test_a_dead_server_costs_one_request_its_budget_and_is_used_again(
    model: Path, tmp_path: Path, name: str, death: Death
) -> None:
    with SERVERS[name](tmp_path) as server:
        toll = measure_death(model, server, death, PLAN)
    assert toll.first < RECOVERY_S
    # Nobody waits for the budget again, the breaker still closed or not: all of them together do
    # not take what nine of ten would.
    assert sum(toll.waiting) < 0.9 * len(toll.waiting) * BUDGET_S
    assert sum(toll.opened) < 0.9 * len(toll.opened) * BUDGET_S
    assert toll.until_hit < RECOVERY_S
