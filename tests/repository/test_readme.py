"""The README begins with commands that exist."""

from __future__ import annotations

import re
from pathlib import Path


def test_the_command_lines_begin_with_making_a_model(repository: Path):
    text = (repository / "README.md").read_text(encoding="utf-8")
    first, *others = re.findall(r"^kvconnect ([^#\n]*\w)", text, re.MULTILINE)
    assert first == "make-model model"
    assert len(others) >= 2


def test_the_make_targets_it_names_exist(repository: Path):
    targets = set(re.findall(r"^([\w-]+):", (repository / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z][\w-]*)`?", (repository / "README.md").read_text()))
    assert {"demo", "test"} <= named <= targets
