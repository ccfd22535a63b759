"""The table of planted identities is whole: each row has a cell in each column, or a reason."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from file_plants import FILE_PLANTS
from rows import COLUMNS, OUTCOMES, ROWS

HERE = Path(__file__).parent
TESTS = HERE.parent
NAMES = [row.name for row in ROWS]


def absent(column):
    path = HERE / "absent" / f"{column}.toml"
    return tomllib.loads(path.read_text()) if path.exists() else {}


@pytest.fixture(scope="module")
def cells():
    """Outcomes by (row, column), of the three kinds of calls that plant, in all tests' sources."""
    found = defaultdict(list)
    for path in TESTS.rglob("*.py"):
        text = path.read_text()
        if not any(f"{name}(" in text for name in ("planted", "file_plants", "cells")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and path.name not in {"file_plants.py", "rows.py"}:
                rows, column, outcome = planted_by(node)
                for row in rows:
                    found[row, column].append(outcome)
    return found


def planted_by(call):
    """The rows, the column and the outcome that a call in a test's source plants."""
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    if name not in {"planted", "file_plants", "cells"}:
        return (), "", ""
    *first, last = call.args
    if name == "cells":
        column, outcome = (argument.value for argument in first)
        return [key.value.partition(":")[0] for key in last.keys], column, outcome
    *rows, column, outcome = (argument.value for argument in call.args)
    planted = " ".join(rows).split() if name == "planted" else [one.row for one in FILE_PLANTS]
    return planted, column, outcome


def test_rows_have_names_of_their_own():
    assert [name for name, count in Counter(NAMES).items() if count > 1] == []


def test_there_are_at_least_sixty_rows():
    assert len(ROWS) >= 60


def test_cells_name_rows_columns_and_outcomes_that_exist(cells):
    assert {row for row, _ in cells} <= set(NAMES)
    assert {column for _, column in cells} <= set(COLUMNS)
    assert {outcome for found in cells.values() for outcome in found} <= set(OUTCOMES)


@pytest.mark.parametrize("column", COLUMNS)
def test_each_row_has_a_cell_or_a_reason_why_it_cannot_happen(cells, column):
    reasons = absent(column)
    planted = {row for row, where in cells if where == column}
    assert set(reasons) <= set(NAMES), "rows that do not exist"
    assert planted & set(reasons) == set(), "rows with a cell and a reason against it"
    assert all(len(reason) > 15 for reason in reasons.values())
    assert [name for name in NAMES if name not in planted and name not in reasons] == []
