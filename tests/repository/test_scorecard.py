"""Every fault that docs/stores.md says cannot happen is covered by checks that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvconnect.testing.checks import all_checks

SEEN_ELSEWHERE = 14


@pytest.fixture(scope="module")
def scorecard(repository: Path) -> dict[str, list[str]]:
    """What covers each fault."""
    text = (repository / "docs/stores.md").read_text(encoding="utf-8")
    _, _, table = text.partition("| seen elsewhere | covered by |\n")
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", table.partition("\n\n")[0], re.MULTILINE)
    return {fault: re.findall(r"`([^`]+)`", covered) for fault, covered in rows}


def test_every_fault_is_covered(scorecard: dict[str, list[str]]) -> None:
    assert len(scorecard) == SEEN_ELSEWHERE
    assert all(scorecard.values())


def test_what_covers_it_exists(scorecard: dict[str, list[str]], repository: Path) -> None:
    checks = {f"{one.group}.{one.name}" for one in all_checks()}
    for covered in scorecard.values():
        for name in covered:
            file, is_test, test = name.partition("::")
            if not is_test:
                assert name in checks
            else:
                source = (repository / file).read_text(encoding="utf-8")
                assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), name
