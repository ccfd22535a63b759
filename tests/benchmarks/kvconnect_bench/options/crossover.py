"""The command ``kvconnect bench crossover``."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvconnect.backends.url import parse_duration
from kvconnect.bench.report import Figure
from kvconnect.cli.command import add_number, picked, require_at_least_one, tell
from kvconnect.errors import ConfigurationError
from kvconnect.simulate.plot import check_plot
from kvconnect_bench.crossover.plan import CrossoverPlan


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``bench crossover``."""
    plan = CrossoverPlan()
    parser.description = """\
Measure the time to the first token of prompts that a store holds, at stores from much slower to
much faster than the model: computed without the store, loaded without computing meanwhile, and
both, from both ends. By turns; takes some half an hour."""
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="default: a random Llama of 4 layers"
    )
    for option, numbers, unit, metavar, about in (
        ("--store-speeds", plan.rates, "", "N,…", "of the store, as multiples of the model's"),
        ("--latencies", plan.first_byte_ms, "ms", "TIME,…", "until a call's first byte"),
        ("--prompts", plan.prompts, "", "N,…", "their tokens"),
        ("--users", plan.users, "", "N,…", "prompts at once"),
    ):
        default = ",".join(f"{one:g}{unit}" for one in numbers)
        parser.add_argument(
            option, default=default, metavar=metavar, help=f"{about} (default: {default})"
        )
    add_number(parser, "--users-prompt", "tokens of each of several users", default=4096)
    add_number(parser, "--prefix-users", "that share one prefix; 0: left out", default=50)
    add_number(parser, "--prefix-tokens", default=10_240)
    add_number(parser, "--repeats", "medians of so many", default=3)
    add_number(parser, "--max-num-tokens", "of a step", default=2048)
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the curves into a .png, .svg or .pdf"
    )
    parser.add_argument("--directory", type=Path, metavar="DIR", help="for scratch files")


def measure(arguments: argparse.Namespace) -> Sequence[Figure]:
    """Returns the figures of ``bench crossover``, and draws them if asked to.

    Raises:
        ConfigurationError: an option is wrong; the message names it and what is right.
        MissingExtra: ``--plot`` without matplotlib.
    """
    from kvconnect_bench.crossover.plot import write_plot
    from kvconnect_bench.crossover.run import crossover, figures_of

    require_at_least_one(arguments, "users_prompt", "prefix_tokens", "repeats", "max_num_tokens")
    if arguments.plot is not None:
        check_plot(arguments.plot)
    plan = CrossoverPlan(
        rates=numbers_of("--store-speeds", arguments.store_speeds),
        first_byte_ms=tuple(
            1000 * parse_duration(one, field="--latencies", zero=True)
            for one in arguments.latencies.split(",")
        ),
        prompts=tuple(map(int, numbers_of("--prompts", arguments.prompts, least=64))),
        users=tuple(map(int, numbers_of("--users", arguments.users, least=1))),
        **picked(
            arguments,
            *("users_prompt", "prefix_users", "prefix_tokens", "repeats", "max_num_tokens"),
        ),
    )
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        measured = crossover(arguments.model, Path(name), plan, tell)
    if arguments.plot is not None:
        write_plot(measured.cells, arguments.plot)
    return figures_of(measured)


def numbers_of(option: str, given: str, least: float | None = None) -> tuple[float, ...]:
    """Returns the numbers in `given`: above 0, or `least` at least.

    Raises:
        ConfigurationError: they are not; the message names `option`.
    """
    try:
        numbers = tuple(map(float, given.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(
        0 < one < math.inf if least is None else least <= one < math.inf for one in numbers
    ):
        wanted = "> 0" if least is None else f"of at least {least:g}"
        raise ConfigurationError(f"{option} {given}: give numbers {wanted}, separated by commas")
    return numbers
