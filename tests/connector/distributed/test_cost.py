"""What ``kvconnect bench restart`` measures of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconnect.bench.rank_exchanges import rank_exchanges


@pytest.mark.slow
def test_exchanges_are_measured_against_a_round_trip(tmp_path: Path) -> None:
    exchanges, floor, ratio = rank_exchanges(tmp_path, steps=50)
    assert exchanges.value > 0
    assert floor.value > 0
    assert ratio.value == pytest.approx(exchanges.value / floor.value)
