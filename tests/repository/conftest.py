"""What tests about the repository itself share."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def tracked(repository: Path) -> list[Path]:
    """Every file that git has and that is there, relative to the root; symlinks are files."""
    if not (repository / ".git").exists():
        pytest.skip("not a git checkout: what git has cannot be told")
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout
    paths = (Path(name) for name in listing.split("\0") if name)
    return [
        path for path in paths if (repository / path).is_symlink() or (repository / path).exists()
    ]
