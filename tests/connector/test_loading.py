"""Connector classes are found by name, built together, and refused with a reason."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest
import recording
from bench_engine import BenchEngine, PlainKv, llm_args
from recording import Recorder, RecordingWorker

from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.errors import ConfigurationError, ConnectorContractError


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """An importable module to put classes into."""
    module = ModuleType("connector_under_test")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def named(scheduler: str = "Recorder", worker: str = "RecordingWorker", module: str = "recording"):
    return KvCacheConnectorConfig(
        connector_module=module,
        connector_scheduler_class=scheduler,
        connector_worker_class=worker,
    )


_CHILD = """
import sys
from bench_engine import llm_args
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.runtime.loading import build_pair, connector_classes

args = llm_args(KvCacheConnectorConfig(transfer={"role": "both"}))
classes = connector_classes(args)
before = set(sys.modules)
pair = build_pair(args, *classes)
print(sorted(name for name in set(sys.modules) - before if name.startswith("kvconnect.connector")))
for half in reversed(pair):
    half.shutdown()
"""


def test_two_constructors_at_once_import_no_module_of_both() -> None:
    """In a process of its own: here all of them are imported already."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run(
        [sys.executable, "-c", _CHILD],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (told.returncode, told.stdout) == (0, "[]\n"), told.stderr


def build(config: KvCacheConnectorConfig, **settings) -> None:
    BenchEngine(llm_args(config, **settings)).close()


@pytest.mark.parametrize("name", ["connector_module", "connector_scheduler_class"])
def test_the_three_names_are_required_together(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"missing: .*connector_worker_class"):
        KvCacheConnectorConfig(**{name: "x"})


def test_a_module_that_lacks_an_import_says_which(module: ModuleType, tmp_path) -> None:
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(ConfigurationError, match="needs 'not_installed_anywhere'"):
            build(named(module="needs_more"))
    finally:
        sys.path.remove(str(tmp_path))


def test_a_module_without_any_connector_class_says_so(module: ModuleType) -> None:
    module.Recorder = Recorder  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="no KvCacheConnectorWorker at all"):
        build(named(module=module.__name__))


def test_a_class_that_lacks_methods_is_refused_naming_them(module: ModuleType) -> None:
    class Lacking(RecordingWorker):
        __abstractmethods__ = frozenset({"start_load_kv"})

    Lacking.__abstractmethods__ = frozenset({"start_load_kv"})
    module.Recorder, module.Lacking = Recorder, Lacking  # type: ignore[attr-defined]
    with pytest.raises(ConnectorContractError, match="'Lacking': does not define start_load_kv"):
        build(named(worker="Lacking", module=module.__name__))


def test_either_constructor_may_wait_for_the_other(module: ModuleType) -> None:
    meeting = threading.Barrier(2, timeout=60)

    class Scheduler(Recorder):
        def __init__(self, args: LlmArgs) -> None:
            super().__init__(args)
            meeting.wait()

    class Worker(RecordingWorker):
        def __init__(self, args: LlmArgs) -> None:
            super().__init__(args)
            meeting.wait()

    module.Recorder, module.RecordingWorker = Scheduler, Worker  # type: ignore[attr-defined]
    build(named(module=module.__name__))


def test_a_constructor_that_fails_is_named_and_the_other_object_shut_down(
    module: ModuleType,
) -> None:
    class Worker(RecordingWorker):
        def __init__(self, args: LlmArgs) -> None:
            raise KeyError("broken")

    script = recording.fresh_script()
    module.Recorder, module.RecordingWorker = Recorder, Worker  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="Worker could not be built: KeyError: 'broken'"):
        build(named(module=module.__name__))
    assert script.scheduler is None or "scheduler.shutdown" in script.names()


def test_a_cache_manager_without_connector_support_is_an_error() -> None:
    class NoConnectors(PlainKv):
        supports_connector = False

    with pytest.raises(ConfigurationError, match="NoConnectors does not support connectors"):
        BenchEngine(llm_args(recording.config()), kv=NoConnectors())


def test_shutdown_ends_the_worker_before_the_scheduler_and_once() -> None:
    script = recording.fresh_script()
    engine = BenchEngine(llm_args(recording.config()))
    engine.close()
    engine.close()
    ends = [name for name in script.names() if name.endswith("shutdown")]
    assert ends == ["worker.shutdown", "scheduler.shutdown"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (named(module="no_such"), r"connector_module='no_such'.*searched.*tests"),
        (
            named(scheduler="Recoder"),
            r"connector_scheduler_class='Recoder': searched module 'recording'.*mean 'Recorder'",
        ),
        (named(scheduler="RecordingWorker"), r"'RecordingWorker'.*not a subclass of"),
        (KvCacheConnectorConfig(url="nowhere://x"), "unknown"),
        (KvCacheConnectorConfig(url="memory:?capacity=1KiB"), "one block takes"),
        (KvCacheConnectorConfig(url="memory:?capaciti=1GiB"), "did you mean 'capacity'"),
        (KvCacheConnectorConfig(url="memory:", staging_bytes=100), "staging_bytes=100"),
        (KvCacheConnectorConfig(), "give url, backend, transfer, or connector_module"),
    ],
)
def test_what_is_wrong_is_said_at_start_up(config: KvCacheConnectorConfig, message: str) -> None:
    with pytest.raises((ConfigurationError, ConnectorContractError), match=message):
        build(config)


def test_block_reuse_off_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="enable_block_reuse=False"):
        build(recording.config(), enable_block_reuse=False)
