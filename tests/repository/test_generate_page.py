"""The table in docs/generate.md is that of the code."""

from __future__ import annotations

import re
from pathlib import Path

from kvconnect import SamplingParams


def test_the_table_has_every_parameter_and_its_default(repository: Path):
    page = (repository / "docs/generate.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| \**`?([\w.-]+)", page, re.MULTILINE)
    defaults = {name: field.default for name, field in SamplingParams.model_fields.items()}
    assert [name for name, _ in rows] == [name for name, _ in rows if name in defaults]
    assert {name for name, _ in rows} == set(defaults)
    for name, shown in rows:
        default = defaults[name]
        assert shown == ("none" if default == () else f"{default}".removesuffix(".0"))
