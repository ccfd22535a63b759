"""docs/identity.md lists every reason against caching, and is short enough to be read."""

from __future__ import annotations

import re
from pathlib import Path

from kvconnect.digest.doubts import Doubt


def test_every_reason_is_on_the_page_in_its_words(repository: Path) -> None:
    page = (repository / "docs/identity.md").read_text(encoding="utf-8")
    section = page.partition("## What is not cached, and why")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| `(?!reason`)", line)]
    expected = [f"| `{doubt.value}` | {doubt.sentence} |" for doubt in Doubt]
    assert rows == expected, "the table should be:\n" + "\n".join(expected)


def test_the_page_is_short(repository: Path) -> None:
    lines = (repository / "docs/identity.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


def test_pages_that_speak_of_keys_lead_there(repository: Path) -> None:
    for name in ("architecture", "engines", "stores"):
        text = (repository / f"docs/{name}.md").read_text(encoding="utf-8")
        assert "(identity.md)" in text, name
