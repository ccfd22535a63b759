"""``kvconnect bench``: speed, as ratios to what the machine can do in the same run."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvconnect.backends.url import StoreUrl, parse_size
from kvconnect.cli.command import (
    Subparsers,
    add_number,
    chosen,
    picked,
    require_at_least_one,
    tell,
)
from kvconnect.cli.options.bench_engines import add_engines_options, run_engines
from kvconnect.cli.options.bench_identity import add_identity_options, run_identity
from kvconnect.cli.options.bench_serve import add_serve_options, run_serve
from kvconnect.cli.options.bench_transfer import add_transfer_options, run_transfer
from kvconnect.errors import ConfigurationError

__all__ = ["add_options"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe ``bench``, and add its benchmarks."""
    parser.description = (
        "Measure speed. Each figure stands beside its floor, measured in the same run."
    )
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    restart = benchmarks.add_parser(
        "restart",
        help="a prompt restored from disk against reading it; an idle connector; two ranks",
    )
    _add_common(restart)
    add_number(restart, "--prompt-tokens", default=4096)
    add_number(restart, "--repeats", "restarts", default=7)
    add_number(restart, "--steps", "decode steps", default=500)
    _runs(restart, run_restart)
    engine = benchmarks.add_parser(
        "engine",
        help="many requests at once against one, a long prompt; and vLLM's engine beside it",
    )
    _add_common(engine)
    add_number(engine, "--requests", default=16)
    add_number(engine, "--prompt-tokens", default=64)
    add_number(engine, "--max-tokens", default=64)
    add_number(engine, "--prefill-tokens", "of the long prompt", default=6000)
    add_number(engine, "--repeats", "medians of so many", default=3)
    engine.add_argument(
        "--peer-python",
        type=Path,
        metavar="PYTHON",
        help="bin/python of an environment with vLLM for the CPU",
    )
    _runs(engine, run_engine)
    serve = benchmarks.add_parser(
        "serve",
        help="what clients of a server wait for: shared prefixes, chats of several turns",
    )
    add_serve_options(serve)
    _runs(serve, run_serve)
    transfer = benchmarks.add_parser(
        "transfer",
        help="reads from a peer's memory against the machine's own; prefill to decode",
    )
    add_transfer_options(transfer)
    _runs(transfer, run_transfer)
    engines = benchmarks.add_parser(
        "engines",
        help="what connectors cost vLLM, idle and after a restart from disk, beside each other",
    )
    add_engines_options(engines)
    _runs(engines, run_engines)
    identity = benchmarks.add_parser(
        "identity",
        help="what it costs to know what computed a block: names, canary, checksums, vLLM's steps",
    )
    add_identity_options(identity)
    _runs(identity, run_identity)
    _add_blocks(benchmarks)
    _add_store(benchmarks)
    _add_dead(benchmarks)
    _add_kernels(benchmarks)


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
    _runs(store, run_store)


def _add_dead(benchmarks: Subparsers) -> None:
    dead = benchmarks.add_parser(
        "dead",
        help="what a store that dies costs requests, and how soon it is used again",
        description="""\
Let a redis-server and a plain S3 server die under an engine: connections refused, packets
black-holed, the process frozen. Measure how much later than without a store the first token comes,
and how long after its recovery the store is used again. Takes some minutes.""",
    )
    dead.add_argument(
        "--model", type=Path, metavar="DIR", help="default: a random Llama, as small as can be"
    )
    dead.add_argument("--stores", default="redis,s3", metavar="NAME,…", help="default: redis,s3")
    add_number(dead, "--prompt-tokens", default=64)
    add_number(dead, "--requests", "to a store that is left alone", default=200)
    add_number(
        dead, "--dead-s", "a store is dead at least so long", default=15.0, type=float, metavar="S"
    )
    add_number(dead, "--lookup-timeout-ms", default=20.0, type=float, metavar="MS")
    dead.add_argument("--directory", type=Path, metavar="DIR", help="for scratch files")
    _runs(dead, run_dead)


def _add_kernels(benchmarks: Subparsers) -> None:
    kernels = benchmarks.add_parser(
        "kernels",
        help="copies of KV blocks against what memory and links can do",
        description="""\
Measure the copies of KV blocks as shares of one copy of the same bytes without gaps, in the same
run: in host memory against memcpy, with one thread each; on a CUDA device and over its link, if
there is one.""",
    )
    add_number(kernels, "--mib", "copied in one measurement on the host", default=64)
    add_number(kernels, "--repeats", "medians of so many", default=9)
    _runs(kernels, run_kernels)


def _add_blocks(benchmarks: Subparsers) -> None:
    blocks = benchmarks.add_parser(
        "blocks",
        help="the block manager against vLLM's and SGLang's, and how its cost grows",
        description="""\
Measure the block manager alone, without a model: prompts that are cached as a whole, prompts that
are new, mixed traffic, block keys, growth and memory. vLLM and SGLang serve the same traffic in the
interpreters given, in turns with kvconnect.""",
    )
    blocks.add_argument(
        "--peer-python",
        type=Path,
        action="append",
        default=[],
        metavar="PYTHON",
        help="bin/python of an environment with vLLM or SGLang; may be given several times",
    )
    add_number(blocks, "--tokens", "of long prompts", default=131_072)
    add_number(blocks, "--requests", "of the mixed traffic", default=10_000)
    add_number(blocks, "--cached-blocks", "of the largest pool", default=1_000_000)
    add_number(blocks, "--rounds", "medians of so many", default=5)
    _runs(blocks, run_blocks)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="default: a random Llama of 46 million parameters"
    )
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="for scratch files, on the disk to measure"
    )


def _runs(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None]) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run_restart(arguments: argparse.Namespace) -> None:
    """Measure a restart, then an idle connector, then what two ranks exchange in a step."""
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


def run_engine(arguments: argparse.Namespace) -> None:
    """Measure the engine's throughput."""
    from kvconnect.bench.report import render
    from kvconnect.bench.throughput import ThroughputPlan, throughput
    from kvconnect.bench.workload import bench_model

    numbers = ("requests", "prompt_tokens", "max_tokens", "prefill_tokens", "repeats")
    require_at_least_one(arguments, *numbers)
    plan = ThroughputPlan(**picked(arguments, *numbers))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        model = bench_model(arguments.model, Path(name))
        figures = throughput(model, plan, arguments.peer_python)
    print(render("engine", figures, as_json=arguments.json))


def run_blocks(arguments: argparse.Namespace) -> None:
    """Measure the block manager beside its peers."""
    from kvconnect.bench.blocks.comparison import compare, growth, memory
    from kvconnect.bench.blocks.peers import OWN, open_field
    from kvconnect.bench.blocks.plan import BlocksPlan
    from kvconnect.bench.report import render

    plan = BlocksPlan(**picked(arguments, "tokens", "requests", "cached_blocks", "rounds"))
    with open_field(arguments.peer_python) as field:
        for sentence in field.left_out:
            tell(sentence)
        figures = compare(field, plan, tell)
        figures += growth(field.parties[OWN], plan, tell)
    figures += memory(plan, tell)
    print(render("blocks", figures, as_json=arguments.json))


def run_store(arguments: argparse.Namespace) -> None:
    """Measure a store.

    Raises:
        ConfigurationError: names the option and what is right.
    """
    from kvconnect.bench.store.payloads import StorePlan
    from kvconnect.bench.store.peer import bench_peer
    from kvconnect.bench.store.report import render
    from kvconnect.bench.store.run import bench_store
    from kvconnect.connector.offload.store import LOADS_IN_FLIGHT, SAVES_IN_FLIGHT

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
    figures = bench_store(arguments.url, plan, tell)
    figures += bench_peer(arguments.url, plan, arguments.peer_python, tell)
    print(render(f"store {StoreUrl.parse(arguments.url)}", figures, as_json=arguments.json))


def run_dead(arguments: argparse.Namespace) -> None:
    """Measure what dead stores cost.

    Raises:
        ConfigurationError: names the option and what is right.
    """
    from kvconnect.bench.checkout import require_checkout

    require_checkout("bench dead")
    from kvconnect.bench.dead.run import DeadPlan, dead_stores
    from kvconnect.bench.report import render
    from kvconnect.bench.servers.mortal import SERVERS

    require_at_least_one(arguments, "prompt_tokens", "requests")
    stores = chosen("--stores", arguments.stores, SERVERS)
    plan = DeadPlan(
        budget_ms=arguments.lookup_timeout_ms,
        **picked(arguments, "prompt_tokens", "requests", "dead_s"),
    )
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        figures = dead_stores(arguments.model, Path(name), stores, plan, tell)
    print(render("dead", figures, as_json=arguments.json))


def run_kernels(arguments: argparse.Namespace) -> None:
    """Measure the copies of blocks."""
    from kvconnect.bench.kernels.run import kernels
    from kvconnect.bench.report import render

    require_at_least_one(arguments, "mib", "repeats")
    figures = kernels(nbytes=arguments.mib << 20, repeats=arguments.repeats, tell=tell)
    print(render("kernels", figures, as_json=arguments.json))
