"""The command ``kvconnect export``: writes blocks of a store to one file."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvconnect.backends.url import format_size
from kvconnect.cli.command import NothingMatched
from kvconnect.cli.wanted import add_wanted, notes_of, store_and_wanted

if TYPE_CHECKING:
    from kvconnect.operations.export import Exported

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``export``."""
    parser.description = (
        "Write the blocks of prompts, of a tenant or of a whole store to one file, for 'kvconnect "
        "import' elsewhere. Until it is complete its name ends in .part; after an interruption the "
        "same command continues it. Every block is checked: a bad one is left out, and the exit "
        "code is 1. The file holds prompts as they are stored; its owner alone may read it."
    )
    add_wanted(parser)
    parser.add_argument("--output", "-o", required=True, metavar="FILE", help="the file to write")
    parser.add_argument(
        "--key-file",
        metavar="F",
        help="a file with a secret of 32 bytes or more: 'import' with the same one refuses a file "
        "that anybody else made",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Writes the file, and prints the result, also after Ctrl-C.

    Raises:
        ConfigurationError: no option names what to export.
        NothingMatched: the store has none of it.
        BadFrame: bad blocks were left out.
    """
    from kvconnect.operations.export import Exported

    store, which = store_and_wanted(arguments)
    done = Exported()
    try:
        store.export(arguments.output, key_file=arguments.key_file, into=done, **which)
    finally:
        if done.opened:
            _report(arguments, done)
    if not done.blocks:
        raise NothingMatched("no block matched")


def _report(arguments: argparse.Namespace, done: Exported) -> None:
    if arguments.json:
        numbers = asdict(done)
        del numbers["opened"]
        print(json.dumps(numbers), flush=True)
        return
    notes = notes_of(done)
    if done.resumed:
        notes.append(f"{done.resumed} were there from before")
    if done.bad:
        notes.append(f"{done.bad} are bad")
    if done.gone:
        notes.append(f"{done.gone} were dropped meanwhile")
    counted = f"exported {done.blocks} blocks, {format_size(done.bytes)}, {done.tokens} tokens"
    print("; ".join([counted, *notes]), flush=True)
