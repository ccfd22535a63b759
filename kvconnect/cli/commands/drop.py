"""The command ``kvconnect drop``: deletes prompts, or all blocks of a tenant."""

from __future__ import annotations

import argparse

from kvconnect.cli.command import NothingMatched, add_json, tell_unknown
from kvconnect.cli.wanted import add_wanted, reported, store_and_wanted
from kvconnect.operations.result import Result

_EPILOG = """\
examples:
  kvconnect drop disk:///var/cache/kv --salt tenant-7
  kvconnect drop disk:///var/cache/kv MODEL --prompt-file contract.txt --continued
  kvconnect drop redis://host --key 8c1f03a2b4d5e6f7

exit codes: 0 all is deleted, 2 wrong usage or configuration, 3 nothing matched, 4 the store or a
tier of it does not answer, so that something may stay
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
    add_wanted(parser)
    parser.add_argument(
        "--continued", action="store_true", help="also all blocks that continue the prompts or keys"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    """Deletes, and prints the result, also after Ctrl-C.

    Raises:
        ConfigurationError: no option chooses blocks to delete.
        NothingMatched: the store has none of the blocks.
    """
    store, which = store_and_wanted(arguments)
    dry_run = arguments.dry_run
    what = "would drop" if dry_run else "dropped"
    done = Result()
    try:
        with reported(arguments, done, what, dry_run=dry_run):
            store.drop(continued=arguments.continued, dry_run=dry_run, into=done, **which)
    finally:
        tell_unknown(done.unknown)
    if not done.blocks:
        raise NothingMatched("no block matched")
