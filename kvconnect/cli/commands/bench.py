"""The command ``kvconnect bench``: measures speeds, as ratios to the machine's own."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvconnect.backends.url import StoreUrl, parse_size
from kvconnect.bench.checkout import from_checkout, has_checkout
from kvconnect.cli.command import Subparsers, add_json, add_number, require_at_least_one, tell
from kvconnect.errors import ConfigurationError

_OF_A_CHECKOUT = (
    *("engine", "serve", "transfer", "engines", "identity", "blocks", "dead"),
    *("crossover", "kernels"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``bench``: `restart` and `store`, and in a checkout the others."""
    parser.description = (
        "Measure speed. Each figure stands beside its floor, measured in the same run."
    )
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    restart = benchmarks.add_parser(
        "restart",
        help="a prompt restored from disk against reading it; an idle connector; two ranks",
    )
    add_model_options(restart)
    add_number(restart, "--prompt-tokens", default=4096)
    add_number(restart, "--repeats", "restarts", default=7)
    add_number(restart, "--steps", "decode steps", default=500)
    add_run(restart, run_restart)
    _add_store(benchmarks)
    if has_checkout():
        from_checkout("commands", "bench").add_benchmarks(benchmarks)
        return
    for name in _OF_A_CHECKOUT:
        # A prefix that no argument has, so that options may follow.
        missing = benchmarks.add_parser(
            name, help="(needs a checkout of kvconnect)", prefix_chars="\0", add_help=False
        )
        missing.add_argument("ignored", nargs="*")
        missing.set_defaults(bench=partial(_refuse, name))


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the model, and of the folder for scratch files."""
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="default: a random Llama of 46 million parameters"
    )
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="for scratch files, on the disk to measure"
    )


def add_run(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None]) -> None:
    """Adds ``--json``, and makes the command call `run` with the arguments."""
    add_json(parser)
    parser.set_defaults(bench=run)


def run(arguments: argparse.Namespace) -> None:
    """Runs the chosen benchmark."""
    arguments.bench(arguments)


def _refuse(name: str, arguments: argparse.Namespace) -> None:
    from_checkout(name, f"bench {name}")


def _add_store(benchmarks: Subparsers) -> None:
    store = benchmarks.add_parser(
        "store",
        help="a store's put, get and lookup against memcpy, raw files or raw sockets",
        description="""\
Measure a store: put, get and lookup of large values, bare and through everything that is put around
it, beside what the machine does with the same bytes in the same run. LMCache moves the same values
in the interpreter given.""",
    )
    store.add_argument(
        "url", metavar="URL", help="as in disk:///var/cache/kv; what it holds already stays"
    )
    store.add_argument(
        "--sizes",
        default="2MiB,32MiB",
        metavar="SIZE,…",
        help="of the values (default: 2MiB,32MiB)",
    )
    store.add_argument(
        "--total", default="512MiB", metavar="SIZE", help="of all of them (default: 512MiB)"
    )
    add_number(store, "--rounds", "medians of so many", default=5)
    add_number(
        store, "--in-flight", "calls at once (default: 3 to store and 3 to load, as the connector)"
    )
    store.add_argument(
        "--peer-python",
        type=Path,
        metavar="PYTHON",
        help="bin/python of an environment with LMCache",
    )
    add_run(store, run_store)


def run_restart(arguments: argparse.Namespace) -> None:
    """Measures a restart, then an idle connector, then what two ranks exchange in a step."""
    from kvconnect.bench.rank_exchanges import rank_exchanges
    from kvconnect.bench.report import render
    from kvconnect.bench.restart import idle_overhead, restart
    from kvconnect.bench.workload import bench_model

    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        scratch = Path(name)
        model = bench_model(arguments.model, scratch)
        figures = restart(
            model, scratch, num_tokens=arguments.prompt_tokens, repeats=arguments.repeats
        )
        print(render("restart", figures, as_json=arguments.json), flush=True)
        idle = idle_overhead(model, steps=arguments.steps)
        print(render("idle connector", idle, as_json=arguments.json), flush=True)
        exchanges = rank_exchanges(scratch, steps=10 * arguments.steps)
        print(render("two ranks", exchanges, as_json=arguments.json))


def run_store(arguments: argparse.Namespace) -> None:
    """Measures a store.

    Raises:
        ConfigurationError: names the option and what is right.
    """
    from kvconnect.bench.store.payloads import StorePlan
    from kvconnect.bench.store.report import render
    from kvconnect.bench.store.run import bench_store
    from kvconnect.connector.io.access import LOADS_IN_FLIGHT, SAVES_IN_FLIGHT

    at_once = arguments.in_flight
    require_at_least_one(arguments, "rounds", "in_flight")
    sizes = tuple(parse_size(size, field="--sizes") for size in arguments.sizes.split(","))
    for size in sizes:
        if size % 4096:
            raise ConfigurationError(f"--sizes {size}: must be multiples of 4096")
    plan = StorePlan(
        sizes=sizes,
        total_nbytes=parse_size(arguments.total, field="--total"),
        rounds=arguments.rounds,
        puts_in_flight=SAVES_IN_FLIGHT if at_once is None else at_once,
        gets_in_flight=LOADS_IN_FLIGHT if at_once is None else at_once,
    )
    peer = None
    if has_checkout() or arguments.peer_python is not None:
        peer = from_checkout("store.peer", "--peer-python")
    figures = bench_store(arguments.url, plan, tell)
    if peer is not None:
        figures += peer.bench_peer(arguments.url, plan, arguments.peer_python, tell)
    print(render(f"store {StoreUrl.parse(arguments.url)}", figures, as_json=arguments.json))
