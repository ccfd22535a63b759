"""The command ``kvconnect export``: writes blocks of a store to one file."""

from __future__ import annotations

import argparse

from kvconnect.cli.command import NothingMatched, add_json
from kvconnect.cli.wanted import add_wanted, report, store_and_wanted

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
    add_json(parser)
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
        report(
            arguments,
            done,
            "exported",
            f"{done.resumed} were there from before" * bool(done.resumed),
            f"{done.bad} are bad" * bool(done.bad),
            f"{done.gone} were dropped meanwhile" * bool(done.gone),
        )
    if not done.blocks:
        raise NothingMatched("no block matched")
