"""The command as a whole: help, exit codes, signals, progress."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvconnect as package
from kvconnect.cli.commands import generate
from kvconnect.cli.main import COMMANDS, main
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.operations.progress import Progress


def test_help_names_every_command_and_shows_how_to_begin(kvconnect):
    code, out, _ = kvconnect("--help")
    assert code == 0
    for name in COMMANDS:
        assert name in out
    assert "kvconnect generate" in out
    assert max(map(len, out.splitlines())) <= 100


def test_the_version_is_the_packages(kvconnect):
    assert kvconnect("--version") == (0, f"kvconnect {package.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (
            ["generate", "model", "--prompt", "x", "--stor", "disk:kv", "--max-tokns=3"],
            "--max-tokens",
        ),
        (["prune", "disk:kv", "--sallt", "x"], "--salt"),
    ],
)
def test_an_unknown_option_names_the_nearest(kvconnect, arguments, meant):
    code, _, err = kvconnect(*arguments)
    assert code == 2
    assert f"did you mean '{meant}'?" in err


def test_help_waits_for_no_library():
    """Of no command: torch takes seconds, and transformers more."""
    code = (
        "import contextlib, io, sys\n"
        "from kvconnect.cli.main import COMMANDS, main\n"
        "for name in COMMANDS:\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        main([name, '--help'])\n"
        "    assert not {'torch', 'transformers'} & sys.modules.keys(), name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_server_whose_store_is_down_may_be_started_again(kvconnect, model, closed_port):
    """Exit code 2 would be final: systemd does not start the unit again after it."""
    arguments = ("--store", f"redis://127.0.0.1:{closed_port}", "--prompt", "x", "--json")
    code, _, err = kvconnect("generate", model, *arguments)
    assert code == 4
    assert json.loads(err)["error"]["exit_code"] == 4
    assert "cannot be opened" in err


@pytest.mark.parametrize(
    ("command", "store", "message"),
    [
        (["serve"], "disk:kv?codec=zst", "did you mean 'zstd'?"),
        (["generate", "--prompt", "x"], "disk:kv?capcity=1GiB", "did you mean 'capacity'?"),
    ],
)
def test_a_wrong_store_is_refused_before_transformers_is_imported(command, store, message):
    name, *more = command
    arguments = [name, "/no/model", "--store", store, *more]
    code = (
        "import sys; from kvconnect.cli.main import main; "
        f"code = main({arguments!r}); "
        "assert 'transformers' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr


def test_an_unknown_command_is_refused(kvconnect):
    code, _, err = kvconnect("genrate")
    assert code == 2
    assert "genrate" in err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigurationError("two\nlines"), 2, "kvconnect: error: two lines\n"),
        (BackendUnavailable("the store is gone"), 4, "kvconnect: error: the store is gone\n"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (KeyboardInterrupt(), 130, ""),
        (ModuleNotFoundError("No module named 'tqdm'", name="tqdm"), 2, "'.[hf]'"),
    ],
)
def test_how_a_command_ends_is_its_exit_code(kvconnect, monkeypatch, error, code, message):
    def fail(arguments: object) -> None:
        raise error

    monkeypatch.setattr(generate, "run", fail)
    found, _, err = kvconnect("generate", "model", "--prompt", "x")
    assert found == code
    assert message in err
    assert "Traceback" not in err


def test_a_bug_is_not_hidden(monkeypatch):
    def fail(arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(generate, "run", fail)
    with pytest.raises(ZeroDivisionError):
        main(["generate", "model", "--prompt", "x"])


def test_sigterm_unwinds_like_an_exception_and_ends_with_143(kvconnect, monkeypatch):
    unwound = []

    def terminated(arguments: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            unwound.append(True)

    monkeypatch.setattr(generate, "run", terminated)
    before = signal.getsignal(signal.SIGTERM)
    assert kvconnect("generate", "model", "--prompt", "x")[0] == 143
    assert unwound == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_reader_that_leaves_ends_it_quietly():
    # Standard output is a pipe whose reading end is closed, as after `| head -0`.
    source = """
import sys
from kvconnect.cli import main
from kvconnect.cli.commands import generate
generate.run = lambda arguments: print("an answer")
sys.exit(main.main(["generate", "model", "--prompt", "x"]))
"""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.returncode == 1
    assert done.stderr == ""


def test_progress_is_plain_lines_when_nobody_watches(capsys, monkeypatch):
    now = iter(range(0, 100, 4))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with Progress("generate", 10, "tokens") as progress:
        for _ in range(5):
            progress.advance(2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[0] == "generate: 4 of 10 tokens"


def test_progress_is_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress("generate", 10, "tokens") as progress:
        progress.advance(10)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "generate" in captured.err
    assert "0/10" in captured.err


_SCHEMES = "import sys; from kvconnect.cli.main import main; sys.exit(main(['schemes']))"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_runs_without_standard_streams(closed):
    script = f'exec "$0" -c "$1" {closed}'
    done = subprocess.run(
        ["/bin/sh", "-c", script, sys.executable, _SCHEMES], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert bool(done.stdout) == (closed == "2>&-")


def test_output_that_is_not_taken_is_an_error_of_one_line():
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", _SCHEMES],
            stdout=full,
            stderr=subprocess.PIPE,
            env=buffered,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "kvconnect: error: [Errno 28] No space left on device\n"
