"""This vLLM has the interfaces that were recorded, and checks settings before it loads weights."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from modes import MODES
from pydantic import ValidationError
from vllm_engine import connector

INTERFACES = Path(__file__).parents[2] / "integrations/interfaces"


def test_the_recorded_interfaces_are_the_installed_ones():
    record = runpy.run_path(str(INTERFACES / "record.py"))
    here = record["interface"]("vllm")
    file = INTERFACES / f"vllm-{here['version']}.json"
    assert file.exists(), f"python {INTERFACES.name}/record.py vllm writes it"
    assert json.loads(file.read_text("utf-8")) == json.loads(record["written"](here))


def test_a_typo_is_found_while_vllm_is_configured(starter):
    says = "1 validation error for VllmConfig\n.*unknown field 'urls'"
    with (
        pytest.raises(ValidationError, match=says),
        starter(MODES[0])(connector("memory:", urls=1)),
    ):
        pass
