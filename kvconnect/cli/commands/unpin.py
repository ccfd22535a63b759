"""The command ``kvconnect unpin``: ends pins."""

from __future__ import annotations

import argparse

from kvconnect.cli.command import NothingMatched, add_json
from kvconnect.cli.wanted import add_wanted, reported, store_and_wanted
from kvconnect.operations.result import Pinned


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``unpin``."""
    parser.description = (
        "Unpin the blocks of prompts: the store may drop them again. A key unpins its own block "
        "only: other prompts may need those before it."
    )
    add_wanted(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    """Unpins, and prints the result, also after Ctrl-C.

    Raises:
        ConfigurationError: no option chooses blocks to unpin, or the store has no pins.
        NothingMatched: none of the blocks was pinned.
    """
    store, which = store_and_wanted(arguments)
    with reported(arguments, Pinned(), "unpinned") as done:
        store.unpin(into=done, **which)
    if not done.blocks:
        raise NothingMatched("no pinned block matched")
