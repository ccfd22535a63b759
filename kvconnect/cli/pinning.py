"""The commands ``kvconnect pin`` and ``kvconnect unpin``: their one line of results."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvconnect.backends.url import format_size
from kvconnect.cli.wanted import notes_of

if TYPE_CHECKING:
    from kvconnect.operations.pin import Pinned

__all__ = ["report_pins"]


def report_pins(arguments: argparse.Namespace, done: Pinned, what: str) -> None:
    """Prints the counts of `done` behind `what`, or as JSON."""
    if arguments.json:
        numbers = asdict(done)
        del numbers["opened"]
        print(json.dumps(numbers), flush=True)
        return
    notes = notes_of(done)
    if done.refused:
        notes.append(f"{done.refused} have no room in the share of pinned blocks (pin_fraction)")
    counted = f"{what} {done.blocks} blocks, {format_size(done.bytes)}, {done.tokens} tokens"
    print("; ".join([counted, *notes]), flush=True)
