"""What must not be in any file of the repository, and what must be in every module."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

# Put together here, so that this file does not hold what it looks for.
PLACES = "|".join(("/" + "work/", "/" + "root/", "/" + "home/", "/" + "opt/", "/" + "tmp/dev"))
HOSTS = "|".join(
    ("pypi" + r"\.org", "pythonhosted" + r"\.org", "index" + "-url", "find" + "-links")
)
FORBIDDEN = re.compile(rf"(?<![\w.])({PLACES})|({HOSTS})")


def test_no_file_names_a_place_on_a_machine_or_a_registry(repository: Path, tracked: list[Path]):
    found = []
    for path in tracked:
        file = repository / path
        if file.is_symlink() or file.suffix == ".png":
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if match := FORBIDDEN.search(line):
                found.append(f"{path}:{number}: {match[0]}")
    assert not found


@pytest.mark.parametrize(
    "text", ["cd /" + "work/x", "'/" + "home/me/x'", "https://pypi" + ".org/x"]
)
def test_such_a_place_is_found(text):
    assert FORBIDDEN.search(text)


def test_symlinks_are_relative_and_lead_somewhere(repository: Path, tracked: list[Path]):
    links = [path for path in tracked if (repository / path).is_symlink()]
    assert {str(path) for path in links} == {
        ".ci/editable/kvconnect",
        "kvconnect/backends",
        "kvconnect/kernels",
    }
    for path in links:
        assert not (repository / path).readlink().is_absolute()
        assert (repository / path).is_dir()


def test_there_is_no_conftest_at_the_root(repository: Path):
    assert not (repository / "conftest.py").exists()


ENGINES = {"vllm"}
"""Packages that adapters of them import, and nothing else does."""


def test_every_exported_name_exists_and_has_a_docstring(repository: Path):
    missing = []
    for file in sorted(repository.glob("kvconnect/**/*.py")) + sorted(
        file for folder in ("backends", "kernels") for file in repository.glob(f"{folder}/**/*.py")
    ):
        parts = file.relative_to(repository).with_suffix("").parts
        name = ".".join(parts if parts[0] == "kvconnect" else ("kvconnect", *parts))
        name = name.removesuffix(".__init__")
        if parts[-1] == "__main__":
            continue
        try:
            module = importlib.import_module(name)
            values = {each: getattr(module, each) for each in getattr(module, "__all__", ())}
        except ModuleNotFoundError as error:
            if error.name not in ENGINES:
                raise
            continue
        if not module.__doc__:
            missing.append(name)
        for exported, value in values.items():
            documented = inspect.isclass(value) or inspect.isroutine(value)
            if documented and not inspect.getdoc(value):
                missing.append(f"{name}.{exported}")
    assert not missing
