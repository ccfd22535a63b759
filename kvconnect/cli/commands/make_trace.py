"""The command ``kvconnect make-trace``: a synthetic trace for ``kvconnect simulate``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from kvconnect.cli.command import add_number, add_old_name, picked
from kvconnect.errors import ConfigurationError
from kvconnect.operations.progress import Progress
from kvconnect.simulate.workload import Workload

_LINES_PER_UPDATE = 256


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``make-trace``."""
    parser.description = (
        "Write a trace of requests as JSON lines, in the format of the published "
        "Mooncake traces: single prompts behind shared system prompts (prompt), chats of several "
        "turns (chat) and agents that call tools in a loop (agent). Sessions begin as a Poisson "
        "process. Equal options write equal traces."
    )
    parser.add_argument("file", metavar="FILE", help="to write; - is standard output")
    add_number(parser, "--requests", "lines", default=10_000)
    add_number(parser, "--seed", default=0)
    add_number(parser, "--rate", "requests per second", default=10.0, metavar="X")
    parser.add_argument(
        "--mix",
        default="prompt=0.2,chat=0.4,agent=0.4",
        metavar="KIND=SHARE,…",
        help="about which share of the requests (default: prompt=0.2,chat=0.4,agent=0.4)",
    )
    add_number(parser, "--system-prompts", "of each kind", default=16)
    add_number(
        parser,
        "--system-tokens",
        "length of a system prompt; half of it for chats, twice for agents",
        default=1536,
    )
    add_number(parser, "--session-tokens", "a session ends before it gets longer", default=32_768)
    add_old_name(parser, "--max-tokens", "--session-tokens")
    add_number(parser, "--hash-tokens", "tokens that a hash id stands for", default=512)
    parser.add_argument("--force", action="store_true", help="overwrite FILE")


def run(arguments: argparse.Namespace) -> None:
    """Writes the trace, and prints a line about it on standard error.

    Raises:
        ConfigurationError: a bad option, or the file exists.
    """
    workload = Workload(
        num_requests=arguments.requests,
        requests_per_s=arguments.rate,
        mix=_mix(arguments.mix),
        max_tokens=arguments.session_tokens,
        **picked(arguments, "seed", "system_prompts", "system_tokens", "hash_tokens"),
    )
    if arguments.file == "-":
        sys.stdout.writelines(workload.lines())
        return
    path = Path(arguments.file)
    try:
        with path.open("w" if arguments.force else "x", encoding="utf-8") as file:
            file.writelines(_told(workload.lines(), workload.num_requests))
    except FileExistsError as error:
        raise ConfigurationError(f"FILE: '{path}' exists; --force overwrites it") from error
    print(
        f"{path}: {workload.num_requests:,} requests, {path.stat().st_size / 1e6:.1f} MB",
        file=sys.stderr,
    )


def _told(lines: Iterable[str], total: int) -> Iterable[str]:
    with Progress("make-trace", total, "requests") as progress:
        for number, line in enumerate(lines, start=1):
            yield line
            if number % _LINES_PER_UPDATE == 0:
                progress.advance(_LINES_PER_UPDATE)


def _mix(text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for part in text.split(","):
        kind, _, share = part.strip().partition("=")
        try:
            shares[kind] = float(share)
        except ValueError:
            raise ConfigurationError(
                f"--mix {text}: KIND=SHARE,… is needed, for example prompt=0.2,chat=0.8"
            ) from None
    return shares
