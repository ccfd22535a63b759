"""``examples/custom_backend.py`` keeps the contract."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvconnect.testing import BackendConformance, Usage

PATH = Path(__file__).parents[2] / "examples" / "custom_backend.py"
SPEC = importlib.util.spec_from_file_location("custom_backend", PATH)
custom_backend = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(custom_backend)


class TestFolder(BackendConformance):
    random_runs = 12

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path):
        self.directory = tmp_path / "blocks"

    def make_backend(self):
        return self.make_in(self.directory)

    def make_in(self, directory):
        return custom_backend.FolderBackend(directory)

    async def usage(self, backend):
        # Whatever is no block was left behind by a process that died.
        files = {file.name: file.stat().st_size for file in self.directory.iterdir()}
        blocks = sum(size for name, size in files.items() if len(name) == 64)
        return Usage(claimed=blocks, found=sum(files.values()))
