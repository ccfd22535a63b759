"""``kvconnect make-trace``: a synthetic trace of requests for ``kvconnect simulate``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from kvconnect.cli.command import Subparsers
from kvconnect.cli.progress import Progress
from kvconnect.errors import ConfigurationError

__all__ = ["add_parser", "run"]

_LINES_PER_UPDATE = 256


def add_parser(subparsers: Subparsers) -> None:
    """Add ``make-trace``."""
    parser = subparsers.add_parser(
        "make-trace",
        help="write a synthetic trace for simulate: system prompts, chats, agents",
        description="Write a trace of requests as JSON lines, in the format of the published "
        "Mooncake traces: single prompts behind shared system prompts (prompt), chats of several "
        "turns (chat) and agents that call tools in a loop (agent). Sessions begin as a Poisson "
        "process. Equal options write equal traces.",
    )
    parser.add_argument("file", metavar="FILE", help="to write; - is standard output")
    parser.add_argument(
        "--requests", type=int, default=10_000, metavar="N", help="lines (default: 10000)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    parser.add_argument(
        "--rate", type=float, default=10.0, metavar="X", help="requests per second (default: 10)"
    )
    parser.add_argument(
        "--mix",
        default="prompt=0.2,chat=0.4,agent=0.4",
        metavar="KIND=SHARE,…",
        help="about which share of the requests (default: prompt=0.2,chat=0.4,agent=0.4)",
    )
    parser.add_argument(
        "--system-prompts", type=int, default=16, metavar="N", help="of each kind (default: 16)"
    )
    parser.add_argument(
        "--system-tokens",
        type=int,
        default=1536,
        metavar="N",
        help="length of a system prompt; half of it for chats, twice for agents (default: 1536)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=32_768,
        metavar="N",
        help="a session ends before it gets longer (default: 32768)",
    )
    parser.add_argument(
        "--hash-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens that a hash id stands for (default: 512)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Write the trace, and say what it is on standard error.

    Raises:
        ConfigurationError: a bad option, or the file exists.
    """
    from kvconnect.simulate.workload import Workload

    workload = Workload(
        num_requests=arguments.requests,
        seed=arguments.seed,
        requests_per_s=arguments.rate,
        mix=_mix(arguments.mix),
        system_prompts=arguments.system_prompts,
        system_tokens=arguments.system_tokens,
        max_tokens=arguments.max_tokens,
        hash_tokens=arguments.hash_tokens,
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
