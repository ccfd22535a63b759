"""The command ``kvconnect pin``: keeps prompts in a store."""

from __future__ import annotations

import argparse

from kvconnect.cli.command import NothingMatched, add_duration, add_json
from kvconnect.cli.wanted import add_wanted, reported, store_and_wanted
from kvconnect.errors import RetryLater
from kvconnect.operations.result import Pinned


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``pin``."""
    parser.description = (
        "Pin the blocks of prompts: the store does not drop them, neither for room nor for their "
        "age. All pinned blocks take no more than a share of its capacity (pin_fraction= in the "
        "URL, 0.5 by default); what has no room is not pinned, and the exit code is 1. Give the "
        "capacity of the engine's URL. A key pins the blocks before it, too. 'drop' deletes pinned "
        "blocks, 'prune' does not."
    )
    add_wanted(parser)
    add_duration(parser, "--for", "so long from now: 12h, 7d, …; default: until they are unpinned")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    """Pins, and prints the result, also after Ctrl-C.

    Raises:
        ConfigurationError: no option chooses blocks to pin, or the store has no pins.
        NothingMatched: the store has none of the blocks.
        RetryLater: some blocks have no room in the share of pinned blocks.
    """
    store, which = store_and_wanted(arguments)
    with reported(arguments, Pinned(), "pinned") as done:
        store.pin(for_s=arguments.for_s, into=done, **which)
    if done.refused:
        raise RetryLater(f"{done.refused} blocks are not pinned")
    if not done.blocks:
        raise NothingMatched("no block matched")
