"""Fixtures for all tests: small random models, made once a session."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# As `make test` does. More threads than cores that are idle wait for each other at every operation:
# on a busy machine an engine's test takes several times as long then.
if "OMP_NUM_THREADS" not in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
    torch.set_num_threads(1)  # plugins have loaded it by now

# How long an example takes, or takes to be made, says how busy the machine is, no more.
settings.register_profile("kvconnect", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvconnect")

# Ignored where this was started in the background, by every process that is started here, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

FORKED = (
    *("torch", "torch.distributed", "nixl", "kvconnect.testing"),
    *("transformers", "transformers.models.llama.modeling_llama", "kvconnect.engine.llm"),
    *("kvconnect.backends.disk", "kvconnect.backends.nixl"),
    *("kvconnect.connector.ranks.distributed", "kvconnect.connector.offload"),
    *("kvconnect.connector.runtime.manager", "kvconnect.transfer.nixl", "kvconnect.transfer.tcp"),
    *("kvconnect.cli.main", "kvconnect.server.run", "kvconnect.server.route.run"),
)
"""What processes that tests fork run: stores, peers, ranks, engines, servers. No modules of tests:
they are not on the path of the server that forks."""

ModelOf = Callable[[str], Path]
WithTemplate = Callable[[Path, str], Path]


@pytest.fixture(autouse=True, scope="session")
def models_are_older_than_this_process() -> Generator[None]:
    """Engines in a test's own process load models that tests made just before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvconnect.integrations.core.models.process_started_ns", time.time_ns)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Read all tests, none of which is garbage; then say what processes are forked with.

    One server forks all of a run, in whichever folder they are: what it lacks, each has to import.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        multiprocessing.set_forkserver_preload(list(FORKED))


@pytest.fixture(autouse=True, scope="session")
def no_test_cuts_the_power() -> Generator[None]:
    """So SQLite need not sync, which takes most of the time of a small disk store."""
    from kvconnect.backends.disk import format as disk_format

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(disk_format._SYNCHRONOUS, "process", "OFF")
        yield


@pytest.fixture(autouse=True, scope="module")
def what_was_imported_is_not_collected() -> None:
    """Else each `gc.collect` of a test looks through all of torch, and through all tests."""
    if not gc.get_freeze_count():  # what benchmarks freeze, they let go again
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """The directory of a small random model of an architecture; not to be changed."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def directory(arch: str) -> Path:
        from kvconnect.engine.checkpoint.random_model import make_model  # transformers: seconds

        return make_model(root / arch, arch, num_layers=3)

    return directory


@pytest.fixture(autouse=True)
def what_ranks_exchange_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with one rank, so that no connector works only where it is alone."""
    from kvconnect.connector.ranks.communicator import SingleProcess  # torch: seconds

    def through_pickle(value: object) -> object:
        return pickle.loads(pickle.dumps(value))

    monkeypatch.setattr(SingleProcess, "broadcast", lambda _, value: through_pickle(value))
    monkeypatch.setattr(SingleProcess, "allgather", lambda _, value: [through_pickle(value)])


@pytest.fixture(autouse=True)
def no_place_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests together open more stores than one process tells apart."""
    from kvconnect.backends.guard.labels import store_labels

    monkeypatch.setattr(store_labels, "_places", set())


@pytest.fixture(scope="session")
def with_template(tmp_path_factory: pytest.TempPathFactory) -> WithTemplate:
    """Makes a copy of a model with this chat template."""

    def copied(model: Path, template: str) -> Path:
        from transformers import AutoTokenizer  # seconds

        directory = tmp_path_factory.mktemp("chatty") / "model"
        shutil.copytree(model, directory)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(directory)
        return directory

    return copied


@pytest.fixture(scope="session")
def llama(model_of: ModelOf) -> Path:
    """A small random Llama."""
    return model_of("llama")


@pytest.fixture
def kvconnect(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str, str]]:
    """Runs a command line; returns exit code, standard output and standard error."""
    from kvconnect.cli.main import main  # torch: seconds

    def run(*arguments: object) -> tuple[object, str, str]:
        code: object
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return run
