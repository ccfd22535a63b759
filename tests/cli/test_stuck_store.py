"""A store that is stuck where no deadline helps: the command ends all the same."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvconnect.backends.main_loop import run_to_end
from kvconnect.backends.registry import open_backend

STUCK = """
import sys
import threading
import kvconnect.backends.disk.path as path
import kvconnect.backends.main_loop as main_loop
import kvconnect.operations.visit as visit
from kvconnect.cli.main import main

def stuck(*_):
    print("stuck", flush=True)
    threading.Event().wait()

path.open_own = stuck
visit._DEADLINE_S = float(sys.argv.pop(1))
main_loop._END_S = 0.5  # until it is left behind
sys.exit(main())
"""
"""A dead mount cannot be had here: opening a file of the store waits for ever instead."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a disk store."""
    url = f"disk://{tmp_path}/kv?capacity=8MiB"

    async def make() -> None:
        store = open_backend(url, raw=True)
        await store.open([])
        await store.close()

    asyncio.run(make())
    return url


def test_the_command_ends_after_its_deadline(url: str) -> None:
    command = [sys.executable, "-c", STUCK, "0.2", "ls", url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 4
    assert run.stdout == "stuck\n"
    assert run.stderr.startswith("kvconnect: error: DiskBackend: open took longer than 0.2 s")
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_command(url: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", STUCK, "600", "-v", "stats", url]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "stuck\n"
        run.send_signal(number)
        assert run.wait(60) == 128 + number


def test_a_signal_that_does_not_interrupt_the_wait_wakes_the_loop() -> None:
    """It arrives just before the loop waits, or, as here, on another thread."""
    main, started = threading.get_ident(), time.monotonic()

    def interrupt() -> None:
        while sys._current_frames()[main].f_code.co_name != "select":
            time.sleep(0.001)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    async def wait() -> None:
        threading.Thread(target=interrupt).start()
        async with asyncio.timeout(60):
            await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        run_to_end(wait())
    assert time.monotonic() - started < 60, "the timeout woke it"
