"""The command ``kvconnect prefetch``: copies prompts to the fastest tier of a tiered store."""

from __future__ import annotations

import argparse

from kvconnect.cli.command import NothingMatched, add_json
from kvconnect.cli.wanted import add_wanted, reported, store_and_wanted
from kvconnect.operations.result import Saved


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``prefetch``."""
    parser.description = (
        "Copy the blocks of prompts to the fastest tier of a tiered: store, from the slower ones. "
        "A tier in memory is passed over: it belongs to the process that opened it. What is there "
        "already is skipped, so the same command continues after an interruption. A bad block is "
        "left out, and the exit code is 1."
    )
    add_wanted(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    """Copies, and prints the result, also after Ctrl-C.

    Raises:
        ConfigurationError: no option chooses blocks to copy, or there is no faster tier.
        NothingMatched: the store has none of the blocks.
        BadFrame: damaged blocks were left out.
    """
    store, which = store_and_wanted(arguments)
    with reported(arguments, Saved(), "copied") as done:
        store.prefetch(into=done, **which)
    if not done.blocks + done.present:
        raise NothingMatched("no block matched")
