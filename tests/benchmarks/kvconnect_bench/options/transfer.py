"""The command ``kvconnect bench transfer``."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvconnect.backends.url import parse_size
from kvconnect.bench.report import Figure
from kvconnect.cli.command import (
    add_duration,
    add_number,
    chosen,
    picked,
    require_at_least_one,
    tell,
)
from kvconnect.errors import ConfigurationError
from kvconnect_bench.options.crossover import numbers_of
from kvconnect_bench.transfer.plan import PARTS, TRANSPORTS, TransferPlan


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``bench transfer``."""
    parser.description = """\
Measure reads from the memory of another process: on one host against process_vm_readv, over the
loopback against a plain socket, over links of a known rate (network namespaces, so as root only);
then prompts from a prefill engine to a decode engine: what of the transfer is not hidden, the first
token, and what two connected engines cost while they are idle."""
    parts = ",".join(PARTS)
    parser.add_argument("--parts", default=parts, metavar="NAME,…", help=f"default: {parts}")
    parser.add_argument(
        "--transports", default="tcp,nixl", metavar="NAME,…", help="default: tcp,nixl"
    )
    pulls = parser.add_argument_group("pulls")
    pulls.add_argument(
        "--total", default="256MiB", metavar="SIZE", help="of one pull (default: 256MiB)"
    )
    pulls.add_argument(
        "--piece", default="64KiB", metavar="SIZE", help="of its pieces (default: 64KiB)"
    )
    add_number(pulls, "--rounds", "medians of so many", default=7)
    pulls.add_argument(
        "--rates", default="1,8", metavar="GBIT,…", help="of the links, in Gbit/s (default: 1,8)"
    )
    handover = parser.add_argument_group("prefill to decode")
    handover.add_argument("--model", type=Path, metavar="DIR", help="default: a random Llama")
    handover.add_argument("--directory", type=Path, metavar="DIR", help="for scratch files")
    add_number(handover, "--prompt-tokens", default=512)
    add_number(handover, "--requests", "medians of so many", default=20)
    add_duration(handover, "--idle", "of watching idle engines", default="5s")


def measure(arguments: argparse.Namespace) -> Sequence[Figure]:
    """Returns the figures of ``bench transfer``.

    Raises:
        ConfigurationError: an option is wrong; the message names it and what is right.
    """
    from kvconnect_bench.transfer.run import bench_transfer

    require_at_least_one(arguments, "rounds", "prompt_tokens", "requests")
    total = parse_size(arguments.total, field="--total")
    piece = parse_size(arguments.piece, field="--piece")
    if piece % 8 or total % piece:
        raise ConfigurationError(
            f"--piece {arguments.piece}: must be a multiple of 8 bytes that divides --total "
            f"{arguments.total}"
        )
    plan = TransferPlan(
        parts=chosen("--parts", arguments.parts, PARTS),
        transports=chosen("--transports", arguments.transports, TRANSPORTS),
        total_nbytes=total,
        piece_nbytes=piece,
        rates_gbit=numbers_of("--rates", arguments.rates),
        **picked(arguments, "rounds", "prompt_tokens", "requests", "idle_s"),
    )
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        return bench_transfer(arguments.model, Path(name), plan, tell)
