"""docs/engines.md says of every family of transformers what the engine does with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from families import computed_in, model_types, write_tiny
from observed import tokens

from kvconnect import LLM, SamplingParams
from kvconnect.errors import UnsupportedModel

_PAGE = Path(__file__).parents[2] / "docs/engines.md"
_SECTION = "## Models of kvconnect's own engine"
_ROW = re.compile(r"^\| (`[\w., `-]+`) \| (equal|not tried|refused: .+) \|$", re.MULTILINE)


def rows() -> dict[str, str]:
    """Returns what the page says of each family."""
    section = _PAGE.read_text(encoding="utf-8").partition(_SECTION)[2].partition("\n## ")[0]
    return {
        name: said
        for names, said in _ROW.findall(section)
        for name in re.findall(r"[^`, ]+", names)
    }


ROWS = rows()
SERVED = [name for name, said in ROWS.items() if said == "equal"]
REFUSED = [name for name, said in ROWS.items() if said.startswith("refused")]


@pytest.mark.slow
def test_the_page_names_every_family():
    assert sorted(ROWS) == model_types()


@pytest.mark.slow
@pytest.mark.parametrize("family", SERVED)
def test_equal(family, tiny, open_llm, reference, prompts):
    with computed_in(torch.float64, family):
        llm = open_llm(tiny(family), max_num_tokens=24)
        for _ in range(2):
            outputs = llm.generate(prompts[:3], SamplingParams(max_tokens=12))
            assert tokens(outputs) == reference(tiny(family), prompts[:3], 12)


@pytest.mark.slow
@pytest.mark.parametrize("family", REFUSED)
def test_refused_by_a_sentence(family, tmp_path):
    write_tiny(tmp_path, family)
    with pytest.raises(UnsupportedModel, match=re.escape(ROWS[family].removeprefix("refused: "))):
        LLM(tmp_path, dtype="float64")
