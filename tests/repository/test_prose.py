"""Pages of prose: lines have at most 120 characters, links lead somewhere, the README is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AT_THE_TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = (*(ROOT / name for name in AT_THE_TOP), *sorted((ROOT / "docs").rglob("*.md")))

WIDEST = 120
README_WORDS = 1_200
GLOSSARY_WORDS = 20
EXAMPLE_LINES = 119

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^\s*```")


def prose(text: str) -> list[tuple[int, str]]:
    """Returns the numbered lines of `text` that are neither code nor rows of a table."""
    kept, in_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line):
            in_code = not in_code
        elif not in_code and not line.lstrip().startswith("|"):
            kept.append((number, line))
    return kept


def too_wide(text: str) -> list[int]:
    return [number for number, line in prose(text) if len(line) > WIDEST]


def anchor(heading: str) -> str:
    """Returns the fragment under which a heading is found, as GitHub makes it."""
    bare = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", bare).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    lines = (line for _, line in prose(page.read_text(encoding="utf-8")))
    return {anchor(line.lstrip("#")) for line in lines if line.startswith("#")}


def broken_links(page: Path) -> list[str]:
    """Returns the links of `page` to files or headings that are not there."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    broken = []
    for target in LINK.findall(text):
        if re.match(r"\w+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path) if path else page
        missing = not file.exists() or (fragment and fragment not in anchors(file))
        broken += [target] if missing else []
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_of_prose_is_wider_than_120_characters(page: Path):
    assert too_wide(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path):
    assert broken_links(page) == []


def test_a_wide_line_is_found_and_a_wide_row_is_not():
    wide = "x" * (WIDEST + 1)
    assert too_wide(f"# Page\n\n{wide}\n| {wide} |\n```text\n{wide}\n```\n") == [3]


def test_a_link_to_nothing_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# One two\n[a](#one-two) [b](#three) [c](gone.md) [d](page.md#one-two)\n")
    assert broken_links(page) == ["#three", "gone.md"]


def test_every_page_is_on_the_map():
    docs = ROOT / "docs"
    text = (docs / "README.md").read_text(encoding="utf-8")
    listed = {target.partition("#")[0] for target in LINK.findall(text)}
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"README.md"}
    assert pages <= listed


def test_the_readme_is_short_and_so_is_the_glossary():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) <= README_WORDS
    map_ = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \*\*", map_.partition("## Glossary")[2], re.MULTILINE)
    assert 10 <= len(rows) <= GLOSSARY_WORDS


def test_examples_are_short():
    lengths = {
        file.name: len(file.read_text(encoding="utf-8").splitlines())
        for file in (ROOT / "examples").glob("*.py")
    }
    assert lengths
    assert {name: count for name, count in lengths.items() if count > EXAMPLE_LINES} == {}
