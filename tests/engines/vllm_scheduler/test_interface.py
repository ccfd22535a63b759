"""What was recorded of vLLM's interfaces is what this vLLM has."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

INTERFACES = Path(__file__).parents[2] / "integrations/interfaces"


def test_the_recorded_interfaces_are_the_installed_ones():
    record = runpy.run_path(str(INTERFACES / "record.py"))
    here = record["interface"]("vllm")
    file = INTERFACES / f"vllm-{here['version']}.json"
    assert file.exists(), f"python {INTERFACES.name}/record.py vllm writes it"
    assert json.loads(file.read_text("utf-8")) == json.loads(record["written"](here))
