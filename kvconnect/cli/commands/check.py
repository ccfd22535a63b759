"""The command ``kvconnect check``: tests whether a store keeps the contract of a backend."""

from __future__ import annotations

import argparse
import secrets
import shutil
from typing import TYPE_CHECKING

from kvconnect.backends.main_loop import run_to_end
from kvconnect.backends.url import StoreUrl, parse_duration
from kvconnect.bench.checkout import from_checkout
from kvconnect.cli.command import add_duration, add_number, add_old_name, require_at_least_one
from kvconnect.errors import ConfigurationError
from kvconnect.operations.progress import Progress

if TYPE_CHECKING:
    from kvconnect.testing.subject import Subject

_DESCRIPTION = """\
Run the conformance kit against a store: the contract of its four methods, integrity, crashes, full
and failing disks, time, random operations, and a small model's tokens. The store is filled and
parts of it are deleted, so give one that is empty. A disk store is made below the directory given,
and removed afterwards."""

_EPILOG = """\
examples:
  kvconnect check disk:///var/cache/kv
  kvconnect check redis://localhost/9 --only contract --only integrity
  kvconnect check disk:///var/cache/kv --soak --for 30m
  kvconnect check redis://localhost/9 --only "end to end" --tensor-parallel-size 2

exit codes: 0 nothing failed, 1 a check failed, 2 wrong usage or configuration, 4 the store cannot
be reached or does not do its work
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``check``."""
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.add_argument("url", metavar="URL", help="of an empty store, as disk:///var/cache/kv")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a group or one check"
    )
    parser.add_argument(
        "--small",
        metavar="URL",
        help="of a bounded store on another, empty medium, with {capacity} for its capacity in "
        "bytes: also check what it drops when it is full",
    )
    add_number(parser, "--seed", "of everything random")
    parser.add_argument("--long", action="store_true", help="the long form: 200 kills, and so on")
    parser.add_argument("--soak", action="store_true", help="random faults, and nothing else")
    add_duration(parser, "--for", "how long to --soak", default="30m")
    add_old_name(parser, "--minutes", "--for", _minutes)
    add_number(
        parser,
        "--tensor-parallel-size",
        "ranks of the engines that the check of a model's tokens, and --soak, run; each rank is a "
        "process that opens the store; of one, --soak calls the store itself",
        default=1,
        metavar="RANKS",
    )
    parser.add_argument("--force", action="store_true", help="also if the store is not empty")


def _minutes(text: str) -> float:
    try:
        return parse_duration(f"{text}m", field="--minutes")
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(arguments: argparse.Namespace) -> None:
    """Checks the store, prints a table, and exits with 1 if anything failed."""
    from kvconnect.testing.subjects import DiskSubject, subject_of

    require_at_least_one(arguments, "tensor_parallel_size")
    seed = secrets.randbelow(1 << 31) if arguments.seed is None else arguments.seed
    subject = subject_of(arguments.url, small=arguments.small)
    subject.ranks = arguments.tensor_parallel_size
    if not arguments.force:
        _expect_empty(subject, arguments.url)
    print(f"seed {seed}", flush=True)
    try:
        fine = (_soak if arguments.soak else _check)(arguments, subject, seed)
    finally:
        if isinstance(subject, DiskSubject):
            shutil.rmtree(subject.directory.parent, ignore_errors=True)
    if not fine:
        raise SystemExit(1)


def _expect_empty(subject: Subject, url: str) -> None:
    async def blocks() -> float:
        async with subject.guarded(30.0) as store:
            return (await store.stats()).get("blocks", 0)

    found = run_to_end(blocks())
    if found:
        raise ConfigurationError(
            f"{StoreUrl.parse(url)}: holds {found:.0f} blocks, which checks may drop; "
            "give an empty store, or --force"
        )


def _check(arguments: argparse.Namespace, subject: Subject, seed: int) -> bool:
    from kvconnect.testing.runner import check_backend, select

    with Progress("check", len(select(arguments.only)), "checks") as progress:
        report = check_backend(
            subject,
            only=arguments.only,
            seed=seed,
            long=arguments.long,
            told=lambda _: progress.advance(1),
        )
    print(report)
    return report.ok


def _soak(arguments: argparse.Namespace, subject: Subject, seed: int) -> bool:
    from kvconnect.testing.check import Violation

    if subject.ranks == 1:
        run_soak = from_checkout("soaks.soak", "check --soak").soak
    else:
        run_soak = from_checkout("soaks.rank_soak", "check --soak").soak_ranks
    seconds: float = arguments.for_s
    done = 0.0
    with Progress("soak", round(seconds), "s") as progress:

        def told(more: float) -> None:
            nonlocal done
            before, done = done, done + more
            progress.advance(round(done) - round(before))

        try:
            report = run_soak(subject, seconds=seconds, seed=seed, told=told)
        except Violation as error:
            print(f"failed: {error}")
            return False
    print(report)
    return True
