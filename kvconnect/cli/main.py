"""The command ``kvconnect``: finds the subcommand, runs it, and ends with the right exit code."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from kvconnect import __version__
from kvconnect.cli.command import Command
from kvconnect.cli.interrupt import Terminated, raise_on_sigterm
from kvconnect.errors import ConfigurationError, KvConnectError, MissingExtra

__all__ = ["COMMANDS", "main"]

COMMANDS = (
    "kvconnect.cli.commands.generate",
    "kvconnect.cli.commands.make_model",
    "kvconnect.cli.commands.ls",
    "kvconnect.cli.commands.stats",
    "kvconnect.cli.commands.verify",
    "kvconnect.cli.commands.prune",
    "kvconnect.cli.commands.copy",
    "kvconnect.cli.commands.simulate",
    "kvconnect.cli.commands.make_trace",
    "kvconnect.cli.commands.bench",
    "kvconnect.cli.commands.check",
)
"""Modules of the subcommands, in the order of ``kvconnect --help``; each fits `Command`."""

_HF_EXTRA = ("safetensors", "tokenizers", "tqdm", "transformers")

_DESCRIPTION = """\
Run a language model whose KV cache survives restarts: prompts that were answered before, in this
process or an earlier one, are loaded from a store instead of computed again."""

_EPILOG = """\
examples:
  kvconnect make-model /tmp/model
  kvconnect generate /tmp/model --prompt 'Once upon a time' --store disk:///tmp/kv
  kvconnect generate /tmp/model --prompt-file long.txt --store disk:///tmp/kv --json

exit codes: 0 success, 1 failure, 2 wrong usage or configuration, 130 Ctrl-C, 143 SIGTERM
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: the process's) and return the exit code.

    SIGTERM and Ctrl-C end it like an exception: what is staged for a store is saved first.
    """
    parsed = make_parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if parsed.verbose else logging.WARNING,
        format="kvconnect: %(levelname)s: %(message)s",
    )
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        with raise_on_sigterm():
            return _run(parsed)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Terminated:
        return 128 + signal.SIGTERM


def _run(parsed: argparse.Namespace) -> int:
    try:
        parsed.run(parsed)
        sys.stdout.flush()
    except ConfigurationError as error:
        return _fail(error, 2)
    except ModuleNotFoundError as error:
        if error.name not in _HF_EXTRA:
            raise
        return _fail(MissingExtra(f"this command ({error})", "hf"), 2)
    except BrokenPipeError:
        # The reader left, as `head` does. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KvConnectError, OSError) as error:
        return _fail(error, 1)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; imports no engine, so that ``--help`` is quick."""
    parser = argparse.ArgumentParser(
        prog="kvconnect",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvconnect {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        command: Command = import_module(name)
        command.add_parser(subparsers)
    return parser


def _fail(error: Exception, code: int) -> int:
    message = " ".join(str(error).split()) or type(error).__name__
    print(f"kvconnect: error: {message}", file=sys.stderr)
    return code
