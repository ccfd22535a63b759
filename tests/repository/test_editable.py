"""An editable install is a folder on the path: type checkers find the package, and no hook runs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = """
from kvconnect import (
    LLM, Backend, BackendUnavailable, Child, EngineStats, RequestOutput, StoredEntry, StreamChunk
)
from kvconnect.backends.disk.store import DiskBackend

def texts(llm: LLM) -> list[str]:
    outputs = llm.generate(["one"])
    return [output.output_text for output in outputs]

def first(output: RequestOutput, chunk: StreamChunk, stats: EngineStats) -> int:
    return output.prompt_tokens + len(chunk.token_ids) + stats.steps

def known(entry: StoredEntry, child: Child) -> bool:
    return entry.key == child.key

store: type[Backend] = DiskBackend
wrong: int = LLM.generate
"""


@pytest.fixture(scope="module")
def site_packages(repository: Path, tmp_path_factory) -> Path:
    """A folder as pip leaves it after ``pip install -e``."""
    made = tmp_path_factory.mktemp("wheel")
    hook = "import kvconnect_build, sys; print(kvconnect_build.build_editable(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, '.ci'); {hook}", str(made)],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = made.glob("*.whl")
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        (record,) = (name for name in archive.namelist() if name.endswith("/RECORD"))
        listed = {line.split(",")[0] for line in archive.read(record).decode().splitlines()}
        assert listed == set(archive.namelist())
    return folder


def test_it_is_one_folder_and_no_hook(site_packages: Path, repository: Path):
    (path,) = site_packages.glob("*.pth")
    assert path.read_text() == f"{repository / '.ci' / 'editable'}\n"
    assert not list(site_packages.glob("*.py"))
    assert [one.name for one in (repository / ".ci" / "editable").iterdir()] == ["kvconnect"]


def test_every_part_is_found_through_it(site_packages: Path, tmp_path: Path):
    code = (
        f"import site, sys; site.addsitedir({str(site_packages)!r}); "
        "sys.meta_path[:] = [one for one in sys.meta_path if '__editable__' not in repr(one)]; "
        "import kvconnect.backends.url, kvconnect.kernels, kvconnect; "
        "from importlib.util import find_spec; assert find_spec('kernels') is None; "
        "print(kvconnect.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("/editable/kvconnect/__init__.py")


@pytest.mark.slow
def test_mypy_finds_it_in_a_users_script(site_packages: Path, tmp_path: Path):
    """The wrong line is found, so that the types are known and not `Any`."""
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (target,) = environment.glob("lib/python*/site-packages")
    for path in site_packages.glob("*.pth"):
        (target / path.name).write_text(path.read_text())
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable"]
    done = subprocess.run(
        [*command, str(environment / "bin" / "python"), "--cache-dir", str(tmp_path), str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("script.py")]
    assert len(lines) == 1, done.stdout
    assert "Incompatible types in assignment" in lines[0]
