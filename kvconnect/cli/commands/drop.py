"""The command ``kvconnect drop``: deletes prompts, or all blocks of a tenant."""

from __future__ import annotations

import argparse
import sys

from kvconnect.cli.command import NothingMatched, add_json
from kvconnect.cli.wanted import add_wanted, report, store_and_wanted
from kvconnect.operations.result import Result

__all__ = ["add_options", "run"]

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
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_wanted(parser)
    parser.add_argument(
        "--continued", action="store_true", help="also all blocks that continue the prompts or keys"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Deletes, and prints the result, also after Ctrl-C.

    Raises:
        ConfigurationError: no option chooses blocks to delete.
        NothingMatched: the store has none of the blocks.
    """
    store, which = store_and_wanted(arguments)
    done = Result()
    try:
        store.drop(continued=arguments.continued, dry_run=arguments.dry_run, into=done, **which)
    finally:
        _report(arguments, done)
    if not done.blocks:
        raise NothingMatched("no block matched")


def _report(arguments: argparse.Namespace, done: Result) -> None:
    what = "would drop" if arguments.dry_run else "dropped"
    report(arguments, done, what, dry_run=arguments.dry_run)
    if done.unknown:
        print(
            f"kvconnect: of {done.unknown} blocks that stay it is not known whose they are: older "
            "versions did not note it, and SGLang and vLLM's tier do not tell it",
            file=sys.stderr,
        )
