"""The command ``kvconnect drop``: deletes prompts, or all that a tenant has."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from kvconnect.backends.url import format_size
from kvconnect.cli.command import NothingMatched
from kvconnect.cli.wanted import add_wanted, notes_of, store_and_wanted
from kvconnect.operations.drop import Dropped

__all__ = ["add_options", "run"]

_EPILOG = """\
examples:
  kvconnect drop disk:///var/cache/kv --salt tenant-7
  kvconnect drop disk:///var/cache/kv MODEL --prompt-file contract.txt --continued
  kvconnect drop redis://host --key 8c1f03a2b4d5e6f7

exit codes: 0 all is deleted, 1 something stays, 2 wrong usage or configuration, 3 nothing matched
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``drop``."""
    parser.description = (
        "Delete the blocks of prompts, or of a tenant, from every tier of a store; also pinned "
        "ones. A block that other prompts begin with, too, is deleted, and computed again when one "
        "of them comes. An engine that has the store open goes on. After an interruption the same "
        "command deletes the rest."
    )
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_wanted(parser)
    parser.add_argument(
        "--continued", action="store_true", help="also all blocks that continue the prompts or keys"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Deletes, and prints the result, also after Ctrl-C.

    Raises:
        ConfigurationError: no option names what to delete.
        NothingMatched: the store has none of it.
    """
    store, which = store_and_wanted(arguments)
    done = Dropped()
    try:
        store.drop(continued=arguments.continued, dry_run=arguments.dry_run, into=done, **which)
    finally:
        if done.opened:
            _report(arguments, done)
    if not done.blocks:
        raise NothingMatched("no block matched")


def _report(arguments: argparse.Namespace, done: Dropped) -> None:
    if arguments.json:
        numbers = asdict(done) | {"dry_run": arguments.dry_run}
        del numbers["opened"]
        print(json.dumps(numbers), flush=True)
        return
    what = "would drop" if arguments.dry_run else "dropped"
    size = format_size(done.bytes)
    counted = f"{what} {done.blocks} blocks, {size}, {done.tokens} tokens"
    print("; ".join([counted, *notes_of(done)]), flush=True)
    if done.unknown:
        print(
            f"kvconnect: of {done.unknown} blocks that stay it is not known whose they are: older "
            "versions did not note it, and SGLang and vLLM's tier do not tell it",
            file=sys.stderr,
        )
