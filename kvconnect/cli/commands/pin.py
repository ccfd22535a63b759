"""The command ``kvconnect pin``: keeps prompts in a store."""

from __future__ import annotations

import argparse

from kvconnect.backends.url import parse_duration
from kvconnect.cli.command import NothingMatched
from kvconnect.cli.pinning import report_pins
from kvconnect.cli.wanted import add_wanted, store_and_wanted
from kvconnect.errors import BackendUnavailable

__all__ = ["add_options", "run"]


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
    parser.add_argument(
        "--for",
        dest="duration",
        metavar="TIME",
        help="so long from now: 12h, 7d, …; default: until they are unpinned",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Pins, and prints the result, also after Ctrl-C.

    Raises:
        ConfigurationError: no option names what to pin, or the store has no pins.
        NothingMatched: the store has none of it.
        BackendUnavailable: some blocks have no room in the share of pinned blocks.
    """
    from kvconnect.operations.pin import Pinned

    for_s = None
    if arguments.duration is not None:
        for_s = parse_duration(arguments.duration, field="--for")
    store, which = store_and_wanted(arguments)
    done = Pinned()
    try:
        store.pin(for_s=for_s, into=done, **which)
    finally:
        if done.opened:
            report_pins(arguments, done, "pinned")
    if done.refused:
        raise BackendUnavailable(f"{done.refused} blocks are not pinned")
    if not done.blocks:
        raise NothingMatched("no block matched")
