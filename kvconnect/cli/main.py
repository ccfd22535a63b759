"""The command ``kvconnect``: finds the subcommand, runs it, and ends with the right exit code."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from difflib import get_close_matches
from importlib import import_module
from keyword import iskeyword
from types import FrameType
from typing import Any, NoReturn

from kvconnect import __version__
from kvconnect.cli.command import Command, NothingMatched
from kvconnect.cli.options.config_file import with_config
from kvconnect.errors import (
    BackendTimeout,
    BackendUnavailable,
    ConfigurationError,
    KvConnectError,
    MissingExtra,
)
from kvconnect.redaction import text_without_passwords, without_passwords
from kvconnect.text import printable

COMMANDS = {
    "generate": "answer prompts with a model, keeping its KV cache in a store",
    "serve": "answer over HTTP as OpenAI's API does, keeping the KV cache in a store",
    "route": "answer over HTTP by way of prefill and decode servers",
    "page": "show a store in a browser: its tiers, tenants and prompts",
    "top": "show the numbers of a server or a store in a terminal",
    "make-model": "write a small random model with a byte-level tokenizer",
    "ls": "list the blocks in a store",
    "stats": "sum up what is in a store",
    "explain": "say what a store has of prompts, and what stands in the way of the rest",
    "verify": "read every block of a store and check it",
    "prune": "delete blocks of a store by age, use, size, model or salt",
    "warm": "compute what a store lacks of prompts, and save it",
    "drop": "delete prompts, or all that a tenant has, from every tier of a store",
    "pin": "keep prompts in a store, for a time or until they are unpinned",
    "unpin": "let a store drop prompts again that were pinned",
    "prefetch": "copy prompts to the fastest tier of a tiered store",
    "export": "write prompts, or all that is in a store, to one file",
    "import": "save the blocks of an exported file to a store",
    "copy": "copy the blocks of a store to another",
    "simulate": "find out from a trace of requests how much cache is worth having",
    "make-trace": "write a synthetic trace for simulate: system prompts, chats, agents",
    "bench": "measure speed against what the machine can do",
    "check": "run the conformance kit against a store",
    "schemes": "list the URL schemes of stores",
    "completion": "print a script that completes commands and options in a shell",
}
"""The subcommands in the order of ``kvconnect --help``; each fits `Command` and has a module."""

_URL = re.compile(r"(--[\w-]+=)?[A-Za-z][A-Za-z0-9+.-]*:")
_EXTRAS = {
    **dict.fromkeys(("safetensors", "tokenizers", "tqdm", "transformers"), "hf"),
    **dict.fromkeys(("httpx2", "jiter", "prometheus_client", "starlette", "uvicorn"), "serve"),
}
"""The extra that installs a package which commands import without a check of their own."""

_EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (
    (ConfigurationError, 2),
    (NothingMatched, 3),
    (BackendUnavailable, 4),
    (BackendTimeout, 4),
)
"""The exit codes of errors; that of all others is 1."""

_STORE_IS_DOWN = (BackendUnavailable, BackendTimeout, TimeoutError)

_DESCRIPTION = """\
Run a language model whose KV cache survives restarts: prompts that were answered before, in this
process or an earlier one, are loaded from a store instead of computed again."""

_EPILOG = """\
examples:
  kvconnect make-model /tmp/model
  kvconnect generate /tmp/model --prompt 'Once upon a time' --store disk:///tmp/kv
  kvconnect generate /tmp/model --prompt-file long.txt --store disk:///tmp/kv --json

exit codes: 0 done, 1 something was found wrong or failed, 2 wrong usage or configuration, 3 nothing
matched, 4 the store cannot be reached or does not do its work, 130 Ctrl-C, 143 SIGTERM. With --json
errors are JSON, on standard error.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line `arguments` (default: the process's) and returns the exit code.

    SIGTERM and Ctrl-C end the command like an exception: blocks that are staged for a store are
    saved first.
    """
    _open_standard_streams()
    try:
        return _main(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Terminated:
        return 128 + signal.SIGTERM


def _main(arguments: Sequence[str]) -> int:
    # Only flags precede the command.
    chosen = next((one for one in arguments if not one.startswith("-")), "")
    try:
        arguments = with_config(arguments, make_parser(chosen))
    except ConfigurationError as error:
        return _fail(error, as_json="--json" in arguments)
    parsed = make_parser(chosen).parse_args(arguments)
    handler = logging.StreamHandler()
    as_json = getattr(parsed, "log_format", "text") == "json"
    handler.setFormatter(JsonLines() if as_json else TextLines())
    logging.basicConfig(
        level=logging.DEBUG if parsed.verbose else logging.WARNING, handlers=[handler]
    )
    # Digests may take minutes before anything else is printed.
    logging.getLogger("kvconnect.digest").setLevel(logging.INFO)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with raise_on_sigterm():
        return _run(parsed)


def _open_standard_streams() -> None:
    """Opens those that the caller closed: other files would get their numbers, and their output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123


class Terminated(BaseException):
    """The exception of SIGTERM. Like ``KeyboardInterrupt`` no ``except Exception`` catches it."""


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raises `Terminated` in the block when SIGTERM arrives. Main thread only.

    A second SIGTERM interrupts the closing that the first one began.
    """
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


class _Parser(argparse.ArgumentParser):
    """The argument parser that hides passwords where it quotes a store's URL."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            wrong = next((one for one in message.split() if one.startswith("--")), "")
            if close := get_close_matches(wrong.partition("=")[0], set(_options_of(self)), n=1):
                message += f"; did you mean '{close[0]}'?"
        for url in filter(_URL.match, self._given):
            for quoted in (url, repr(url)[1:-1]):
                message = message.replace(quoted, without_passwords(url))
        if "--json" in self._given:
            _print_error("ConfigurationError", 2, message, as_json=True)
            self.exit(2)
        super().error(message)


def _options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the options of `parser` and of the chosen command, without old names."""
    for action in parser._actions:  # noqa: SLF001  argparse has no public list
        if action.help != argparse.SUPPRESS:
            yield from action.option_strings
        if isinstance(action.choices, Mapping):
            for chosen in action.choices.values():
                yield from _options_of(chosen)


def _run(parsed: argparse.Namespace) -> int:
    failure: Exception
    try:
        parsed.run(parsed)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        _discard_output()
        return 1
    except ModuleNotFoundError as error:
        if (extra := _EXTRAS.get((error.name or "").partition(".")[0])) is None:
            raise
        failure = MissingExtra(f"this command ({error})", extra)
    except (KvConnectError, NothingMatched, OSError) as error:
        failure = error
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    return _fail(failure, as_json=getattr(parsed, "json", False))


def _discard_output() -> None:
    """Discards what standard output did not take: Python tries it again at exit, and fails."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Makes the parser of the whole command line.

    Args:
        only: the command whose options are needed; the modules of other commands are not imported.
            ``None``: all commands.
    """
    parser = _Parser(
        prog="kvconnect",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvconnect {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, about in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=about)
        if only in {name, None}:
            module = name.replace("-", "_") + "_" * iskeyword(name)
            command: Command = import_module(f"kvconnect.cli.commands.{module}")
            command.add_options(subparser)
            subparser.set_defaults(run=command.run)
            if subparser.epilog is not None:
                subparser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def _fail(error: Exception, *, as_json: bool) -> int:
    text = str(error) if isinstance(error, KvConnectError) else text_without_passwords(str(error))
    message = " ".join(text.split()) or type(error).__name__
    cause = error
    if isinstance(error, ConfigurationError) and isinstance(error.__cause__, _STORE_IS_DOWN):
        cause = BackendUnavailable()  # an engine's store, which may be up the next time
    code = next((code for kind, code in _EXIT_CODES if isinstance(cause, kind)), 1)
    _print_error(type(error).__name__, code, message, as_json=as_json)
    return code


def _print_error(name: str, code: int, message: str, *, as_json: bool) -> None:
    line = f"kvconnect: error: {printable(message)}"
    if as_json:
        line = json.dumps({"error": {"type": name, "exit_code": code, "message": message}})
    print(line, file=sys.stderr)


class TextLines(logging.Formatter):
    """Formats a record as ``kvconnect: WARNING: …``."""

    def __init__(self) -> None:
        super().__init__("kvconnect: %(levelname)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line; passwords in lines of other packages are hidden."""
        return _hidden(record, super().format(record))


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object on a line.

    Its keys are ``time`` (UTC), ``level``, ``logger`` and ``message``, ``traceback`` of an error,
    and those of the record's ``fields``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the object; passwords are hidden as by `TextLines`."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": _hidden(record, record.getMessage()),
        }
        if record.exc_info:
            line["traceback"] = _hidden(record, self.formatException(record.exc_info))
        return json.dumps(line | getattr(record, "fields", {}))


def _hidden(record: logging.LogRecord, text: str) -> str:
    # Records of kvconnect contain no passwords.
    return text if record.name.partition(".")[0] == "kvconnect" else text_without_passwords(text)
