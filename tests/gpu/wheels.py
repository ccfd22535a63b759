"""Downloads what a machine with a GPU lacks, as a folder of wheels that ``run.py --wheels`` takes.

Usage: ``python tests/gpu/wheels.py FOLDER [--python 3.12] [--nixl]``, where there is a network. The
machine is expected to have torch, transformers, numpy, safetensors, tokenizers, pytest with
timeouts, hypothesis, xxhash, aiofiles, msgpack, psutil and CUDA's tools. Versions are those of
constraints.txt.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
LACKING = (
    *("pydantic", "pydantic_core", "annotated-types", "typing-inspection", "typing_extensions"),
    *("pytest-asyncio", "redis", "hiredis", "msgpack"),
)
NIXL = ("nixl", "nixl-cu13")
"""Much larger than all others together."""
PLATFORMS = (
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_24",
    "manylinux_2_17",
    "manylinux2014",
)


def versions() -> dict[str, str]:
    """Returns the pinned versions by name."""
    lines = CONSTRAINTS.read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.lower().replace("-", "_"): version for name, version in pairs}


def download(folder: Path, names: tuple[str, ...], python: str) -> None:
    """Downloads one wheel for each of `names` into `folder`, for x86-64 and that Python."""
    pinned = versions()
    platforms = [f"--platform={name}_x86_64" for name in PLATFORMS]
    wanted = [f"{name}=={pinned[name.lower().replace('-', '_')]}" for name in names]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    subprocess.run([*command, *platforms, "-d", str(folder), *wanted], check=True)


def main() -> int:
    """Downloads them and prints their size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of that machine (default: 3.12)")
    parser.add_argument("--nixl", action="store_true", help="NIXL, too")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    download(given.folder, LACKING + (NIXL if given.nixl else ()), given.python)
    wheels = sorted(given.folder.glob("*.whl"))
    total = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {total / 2**20:.1f} MiB, in {given.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
