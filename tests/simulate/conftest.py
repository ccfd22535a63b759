"""What the tests of the simulator share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from kvconnect.simulate.trace_reader import TraceRequest


@pytest.fixture
def request_of():
    """Makes a request from its tokens, `output` of them generated."""

    def make(prompt, output=(), *, at=0.0, system=None):
        tokens = np.array([*prompt, *output], np.int32)
        return TraceRequest(1, at, len(prompt), len(output), system, tokens, output_known=True)

    return make


@pytest.fixture
def write_trace(tmp_path: Path):
    """Writes a trace of these objects, or of lines as they are; returns its path."""

    def write(lines: Iterable[object], name: str = "trace.jsonl") -> str:
        path = tmp_path / name
        text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write
