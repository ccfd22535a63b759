"""The kit without pytest: what it reports, that nothing hangs it, and what it imports."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import pytest

from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.errors import ConfigurationError
from kvconnect.testing import BackendConformance, Subject, Violation, check_backend, plugin
from kvconnect.testing.check import Check
from kvconnect.testing.checks import all_checks
from kvconnect.testing.runner import run_check, select
from kvconnect.testing.subjects import DiskSubject, MemorySubject, TieredSubject, subject_of
from kvconnect_bench.soaks.soak import soak

ROOT = Path(__file__).parents[2]


class Forgets(MemoryBackend):
    async def load(self, keys, into):
        return 0


class SlowToOpen(MemoryBackend):
    async def open(self, layouts, access="store"):
        await asyncio.sleep(1.0)  # twice the deadline of the calls that fail
        await super().open(layouts, access=access)


def make_memory():
    return MemoryBackend(64 << 20)


def test_report_of_a_right_backend():
    told = []
    report = check_backend(make_memory, only=["keys"], seed=5, told=told.append)
    assert report.ok
    report.raise_on_failure()
    assert tuple(told) == report.outcomes
    assert {outcome.result for outcome in told} == {"passed"}
    assert str(report).endswith("7 passed, 0 failed, 0 skipped (seed 5)")


def test_report_of_a_wrong_one_names_check_and_reason():
    report = check_backend(
        lambda: Forgets(64 << 20), only=["contract.save_again", "contract.delete"]
    )
    assert not report.ok
    with pytest.raises(Violation, match=r"contract\.save_again .* load filled 0 of 4 blocks"):
        report.raise_on_failure()


def test_time_that_opening_takes_is_not_that_of_calls_that_fail():
    check_backend(lambda: SlowToOpen(64 << 20), only=["faults.swaps"]).raise_on_failure()


class Maker:
    def make(self):
        return make_memory()


def closure():
    capacity = 64 << 20
    return lambda: MemoryBackend(capacity)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: MemoryBackend(64 << 20), id="lambda"),
        pytest.param(closure(), id="closure"),
        pytest.param(partial(MemoryBackend, 64 << 20), id="partial"),
        pytest.param(Maker().make, id="method"),
    ],
)
def test_what_a_child_process_cannot_import_is_refused_alike_and_serves_all_other_checks(make):
    report = check_backend(make, only=["keys.any_bytes", "resources.no_descriptors"])
    assert [one.result for one in report.outcomes] == ["passed", "skipped"]
    assert "give a function at the top of a module" in report.outcomes[1].reason


SCRIPTS = {
    "guarded.py": """
from kvconnect.backends.memory.store import MemoryBackend


def make():
    print("making")
    return MemoryBackend(64 << 20)
""",
    "script.py": """
import sys
from kvconnect.testing import check_backend
import kvconnect.testing.checks

print({"pytest", "transformers", "hypothesis", "kvconnect.engine"} & set(sys.modules))
import guarded


def make():
    return guarded.make()


for made in (make, guarded.make):
    print(check_backend(made, only=["resources.no_descriptors"]), flush=True)
""",
}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """What a script without a guard prints, where it is started, and whether a process is left."""
    folder = tmp_path_factory.mktemp("script")
    working = tmp_path_factory.mktemp("working")
    for name, code in SCRIPTS.items():
        (folder / name).write_text(code, encoding="utf-8")
    for module in ("json", "logging", "torch"):
        trap = f"open({str(working / 'trapped')!r}, 'a').write({module!r})"
        (working / f"{module}.py").write_text(trap, encoding="utf-8")
    mark = f"{folder.name}-{time.monotonic_ns()}"  # in the environment of all that it starts
    run = subprocess.run(
        [sys.executable, folder / "script.py"],
        cwd=working,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"KVCONNECT_TEST_MARK": mark},
    )
    left = []
    for process in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            left += [process.parent.name] * (mark.encode() in process.read_bytes())
    return run.stdout, working, left


def test_a_script_without_a_guard_is_refused_and_leaves_no_process(script):
    """Each fork server else runs the script again, and starts another one, for ever."""
    said, _, left = script
    assert said.count("put that under if __name__ == '__main__'") == 1
    assert "0 passed, 1 failed, 0 skipped" in said
    assert left == []


def test_child_processes_import_nothing_from_the_working_directory(script):
    """And what the backend prints there disturbs nothing."""
    said, working, _ = script
    assert "1 passed, 0 failed, 0 skipped" in said
    assert not (working / "trapped").exists()


def test_neither_pytest_nor_the_engine_is_imported_before_it_is_needed(script):
    assert script[0].startswith("set()")


def test_every_module_that_is_started_is_started_without_the_working_directory():
    started = []
    for folder in ("kvconnect", "backends", "examples", "tests/benchmarks"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            started += re.findall(r'sys\.executable,\s*"-(?:P", "-)?m"', text)
    assert len(started) >= 4
    assert all('"-P"' in one for one in started), started


def test_what_cannot_be_asked_is_skipped_and_says_what_is_missing():
    (outcome,) = check_backend(make_memory, only=["resources.capacity"]).outcomes
    assert (outcome.result, outcome.reason[:12]) == ("skipped", "make_small()")


def test_what_is_left_out_is_skipped_with_its_reason():
    class Mine(MemorySubject):
        skip: ClassVar = {"contract": "is known to be wrong"}

    (outcome,) = check_backend(Mine(), only=["contract.round_trip"]).outcomes
    assert (outcome.result, outcome.reason) == ("skipped", "is known to be wrong")


def test_tiered_url_is_checked_with_frames_which_is_what_tiers_take(tmp_path):
    subject = subject_of(f"tiered:?tiers=memory:,disk:{tmp_path}/store%3Fcapacity=1GiB")
    assert isinstance(subject, TieredSubject)
    only = ["contract.round_trip", "contract.two_processes", "capabilities"]
    check_backend(subject, only=only).raise_on_failure()


@pytest.mark.parametrize(
    ("url", "checked"),
    [
        ("s3://bucket/kv", "s3://bucket/kv?lookup_ttl=0&miss_ttl=0"),
        ("s3://bucket/kv?miss_ttl=1s", "s3://bucket/kv?miss_ttl=1s&lookup_ttl=0"),
    ],
)
def test_clients_of_a_bucket_remember_nothing_while_they_are_compared(url, checked):
    assert subject_of(url).url == checked


def test_unknown_check_names_the_nearest():
    with pytest.raises(ConfigurationError, match="'contrakt' is unknown; did you mean 'contract'"):
        select(["contrakt"])


@pytest.mark.parametrize("blocking", [True, False])
def test_a_check_that_hangs_is_a_failure(blocking, monkeypatch):
    async def hang(subject: Subject):
        import asyncio

        if blocking:
            time.sleep(3)  # noqa: ASYNC251 - as a backend would do
        await asyncio.Event().wait()

    monkeypatch.setattr("kvconnect.testing.runner._GRACE_S", 0.2)
    outcome = run_check(Check("group", "name", "", hang, 0.1), MemorySubject())
    assert outcome.result == "failed"
    assert "hangs" in outcome.reason


def test_every_check_says_what_it_demands():
    for check in all_checks():
        assert check.demands.endswith("."), check.id
        assert len(check.demands) > 30, check.id
    assert len({check.id for check in all_checks()}) == len(all_checks())


def test_the_class_has_a_test_for_each_check():
    tests = [name for name in vars(BackendConformance) if name.startswith("test_")]
    assert len(tests) == len(all_checks())


def test_the_plug_in_is_an_entry_point_and_registers_the_markers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (module,) = project["entry-points"]["pytest11"].values()
    assert import_module(module) is plugin

    class Config:
        lines = []  # noqa: RUF012

        def addinivalue_line(self, name, line):
            self.lines.append((name, line.partition(":")[0]))

    plugin.pytest_configure(Config())
    used = [("markers", "kvconnect(group)"), ("markers", "kvconnect_root")]
    assert Config.lines == used


# ---------------------------------------------------------------------------------------- soak


def test_soak_of_a_right_store_reports_what_it_did(tmp_path):
    told = []
    report = soak(DiskSubject(tmp_path / "store"), seconds=0.5, seed=9, told=told.append)
    assert report.rounds >= 1
    assert report.counts["loads"] > 0
    assert report.counts["blocks loaded"] > 0
    assert "seed 9" in str(report)
    assert sum(told) <= report.seconds + 0.1


def test_soak_of_a_wrong_one_names_seed_and_fault():
    class Unguarded(MemorySubject):
        def guarded(self, deadline_s=10.0, backend=None):
            return self.opened(backend)

        def bare(self, backend):
            return backend

    with pytest.raises(Violation, match=r"^seed 2, fault \w+: "):
        soak(Unguarded(), seconds=60, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_minute_of_soak(kind, tmp_path):
    subject = MemorySubject() if kind == "memory" else DiskSubject(tmp_path / "store")
    assert soak(subject, seconds=60, seed=1).rounds > 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_kills(tmp_path):
    subject = DiskSubject(tmp_path / "store")
    subject.long = True
    for check in select(["crash"]):
        outcome = run_check(replace(check, limit_s=900), subject)
        assert outcome.result == "passed", outcome.reason


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["disk", "tiered"])
def test_three_hundred_random_runs(kind, tmp_path):
    tiered = f"tiered:?tiers=memory:,disk:{tmp_path}/store%3Fcapacity=1GiB"
    subject = DiskSubject(tmp_path / "store") if kind == "disk" else subject_of(tiered)
    subject.long = True
    outcomes = [run_check(check, subject) for check in select(["model"])]
    assert "passed" in {outcome.result for outcome in outcomes}
    assert not [outcome for outcome in outcomes if outcome.result == "failed"]
