"""docs/reliability.md names every attack that there is, with tests that exist."""

from __future__ import annotations

import re
from pathlib import Path


def test_every_attack_is_on_the_page_with_its_tries(repository: Path) -> None:
    page = (repository / "docs/reliability.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| ([\d,]+) tries.* \| `(tests/\S+)` \|$", page, re.MULTILINE)
    told = {file: tries for tries, file in rows}
    there = sorted((repository / "tests/hostile").glob("test_*.py"))
    assert told.keys() == {file.relative_to(repository).as_posix() for file in there}
    for file in there:
        (tries,) = re.findall(r'param\((\d+), id="long"', file.read_text(encoding="utf-8"))
        assert told[file.relative_to(repository).as_posix()] == f"{int(tries):,}"
