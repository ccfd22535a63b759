"""Wheel and sdist hold what git has, and name what the code registers."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvconnect.backends import registry

LINKS = {"kvconnect/backends", "kvconnect/kernels", ".ci/editable/kvconnect"}
"""For checkouts; a distribution holds what they point to at its own place."""


@pytest.fixture(scope="session")
def built(repository: Path, tracked: list[Path], tmp_path_factory) -> Path:
    """The folder with wheel and sdist, built from what git has and nothing else."""
    source = tmp_path_factory.mktemp("source")
    for path in tracked:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repository / path, source / path, follow_symlinks=False)
    dist = tmp_path_factory.mktemp("dist")
    # The wheel is built from the sdist: that shows that the sdist is complete.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dist


@pytest.fixture(scope="session")
def wheel_names(built: Path) -> set[str]:
    (wheel,) = built.glob("*.whl")
    return {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}


def test_the_wheel_holds_every_module_of_the_library_and_nothing_else(
    wheel_names, tracked: list[Path]
):
    expected = set()
    for path in map(str, tracked):
        top = path.partition("/")[0]
        if top in {"backends", "kernels"}:
            expected.add(f"kvconnect/{path}")
        elif top == "kvconnect" and path not in LINKS:
            expected.add(path)
    assert {name for name in wheel_names if ".dist-info/" not in name} == expected


NEED_A_CHECKOUT = {
    "bench dead": "bench dead",
    "bench serve": "bench serve --url http://x --chats=3",
    "bench kernels": "bench kernels --help",
    "check --soak": "check memory: --soak",
    "--peer-python": "bench store memory: --peer-python python3 --total 1MiB --sizes 4KiB",
}
COMMANDS = """
import sys
from kvconnect.cli.main import main

for words in sys.argv[1:]:
    try:
        print("exit", main(words.split()))
    except SystemExit as stopped:
        print("exit", stopped.code)
"""


def test_the_wheel_measures_a_store_without_its_floor_and_what_needs_a_checkout_says_so(
    built: Path, tmp_path: Path
):
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)  # where there is nothing else
    store = "bench store memory: --total 1MiB --sizes 64KiB --rounds 1"
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMANDS, *NEED_A_CHECKOUT.values(), store],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    codes = re.findall(r"^exit (.*)$", done.stdout, re.MULTILINE)
    assert codes == [*["2"] * len(NEED_A_CHECKOUT), "0"], done.stderr
    assert "get" in done.stdout
    for what in NEED_A_CHECKOUT:
        assert f"{what}: needs a checkout of kvconnect" in done.stderr
    assert "floors are left out" in done.stderr


def test_the_sdist_holds_every_file(built: Path, tracked: list[Path]):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {name for name in names if ".egg-info/" in name or name in {"PKG-INFO", "setup.cfg"}}
    assert names - made == {str(path) for path in tracked} - LINKS


def test_the_wheel_registers_the_command_and_every_built_in_backend(built: Path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        parser = configparser.ConfigParser()
        parser.read_string(archive.read(name).decode())
    assert dict(parser["console_scripts"]) == {"kvconnect": "kvconnect.cli.main:main"}
    assert dict(parser[registry.ENTRY_POINT_GROUP]) == registry._BUILT_IN


def test_the_licence_is_in_the_wheel(wheel_names):
    assert any(name.endswith("/licenses/LICENSE") for name in wheel_names)


def pinned(repository: Path) -> dict[str, str]:
    lines = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_everything_that_is_installed_is_pinned(repository: Path):
    pins = pinned(repository)
    try:
        wanted = [("kvconnect", frozenset({"hf", "dev"}))]
        distribution("kvconnect")
    except PackageNotFoundError:
        pytest.skip("kvconnect is not installed here, so nothing says what it needs")
    seen: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        name, extras = wanted.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for text in distribution(name).requires or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                found = canonicalize_name(requirement.name)
                wanted.append((found, frozenset(requirement.extras)))
    needed = {canonicalize_name(name) for name, _ in seen} - {"kvconnect"}
    assert needed <= set(pins)
    for name in needed:
        assert distribution(name).version.partition("+")[0] == pins[name], name
