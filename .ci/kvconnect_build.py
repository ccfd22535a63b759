"""The build backend of setuptools, with editable wheels that work for type checkers.

setuptools installs a package that lies in several folders with an import hook, which mypy and
pyright do not run. `.ci/editable/kvconnect` is a link to the package, alone in its folder. A
``.pth`` file that names this folder finds the same modules.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_FOLDER = Path(__file__).resolve().parent / "editable"


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Makes the wheel of an editable install; see PEP 660."""
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    _replace_hook(Path(wheel_directory) / name)
    return name


def _replace_hook(path: Path) -> None:
    """Replaces the import hook in the wheel `path` with a ``.pth`` file that names one folder."""
    with zipfile.ZipFile(path) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    kept = {name: data for name, data in files.items() if ".dist-info/" in name}
    record = next(name for name in kept if name.endswith(".dist-info/RECORD"))
    del kept[record]
    kept["kvconnect.pth"] = f"{_FOLDER}\n".encode()
    lines = [f"{name},{_hash(data)},{len(data)}" for name, data in kept.items()]
    kept[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in kept.items():
            wheel.writestr(name, data)


def _hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"sha256={digest.rstrip(b'=').decode()}"
