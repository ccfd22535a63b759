"""Wheel and sdist hold what git has, and name what the code registers."""

from __future__ import annotations

import configparser
import os
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


@pytest.fixture(scope="session")
def from_the_wheel(built: Path, tmp_path_factory):
    """Runs the command of the wheel, unpacked where there is nothing else."""
    (wheel,) = built.glob("*.whl")
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "kvconnect", *arguments]
        env = {**os.environ, "PYTHONPATH": str(folder)}
        return subprocess.run(
            command, env=env, cwd=folder, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("bench", "dead"), "bench dead"),
        (("bench", "serve", "--url", "http://x", "--chats=3"), "bench serve"),
        (("bench", "kernels", "--help"), "bench kernels"),
        (("check", "memory:", "--soak"), "check --soak"),
        (("bench", "store", "memory:", "--peer-python", "python3"), "--peer-python"),
    ],
)
def test_what_needs_a_checkout_says_so(from_the_wheel, arguments, what):
    small = ("--total", "1MiB", "--sizes", "4KiB") if "store" in arguments else ()
    done = from_the_wheel(*arguments, *small)
    assert done.returncode == 2
    assert f"{what}: needs a checkout of kvconnect" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_store_is_measured_without_its_floor(from_the_wheel):
    done = from_the_wheel(
        *("bench", "store", "memory:", "--total", "1MiB", "--sizes", "64KiB", "--rounds", "1")
    )
    assert done.returncode == 0, done.stderr
    assert "floors are left out" in done.stderr
    assert "get" in done.stdout


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
