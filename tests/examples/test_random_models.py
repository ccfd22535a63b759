"""Examples that make a model say beforehand that it is random, each time that they use it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = ("persistent_prompt_cache", "disaggregated_serving", "serve")


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_random_model_is_announced_also_when_it_was_made_before(
    name: str, repository_root: Path, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(str(repository_root / "examples"))
    names = runpy.run_path(str(repository_root / "examples" / f"{name}.py"))
    demo_model = names["demo_model"]
    demo_model.__globals__["DEMO"] = tmp_path
    (tmp_path / "model").mkdir()
    assert demo_model() == tmp_path / "model"
    assert capsys.readouterr().out.startswith("The model is random")


def test_all_others_that_make_one_say_so(repository_root: Path):
    sources = [file.read_text(encoding="utf-8") for file in repository_root.glob("examples/*.py")]
    making = [text for text in sources if "make_model(" in text]
    assert len(making) >= len(EXAMPLES)
    assert all("The model is random" in text for text in making)
