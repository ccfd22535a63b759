"""The benchmarks of ``kvconnect bench`` that are no part of the wheel."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from kvconnect.cli.command import (
    Subparsers,
    add_number,
    chosen,
    picked,
    require_at_least_one,
    tell,
)
from kvconnect.cli.commands.bench import add_model_options, add_run
from kvconnect_bench.options.engines import add_engines_options, run_engines
from kvconnect_bench.options.identity import add_identity_options, run_identity
from kvconnect_bench.options.serve import add_serve_options, run_serve
from kvconnect_bench.options.transfer import add_transfer_options, run_transfer
from kvconnect_bench.peer_python import add_peer_python

__all__ = ["add_benchmarks"]


def add_benchmarks(benchmarks: Subparsers) -> None:
    """Adds the subcommands of all benchmarks of this package."""
    engine = benchmarks.add_parser(
        "engine",
        help="many requests at once against one, a long prompt; and vLLM's engine beside it",
    )
    add_model_options(engine)
    add_number(engine, "--requests", default=16)
    add_number(engine, "--prompt-tokens", default=64)
    add_number(engine, "--max-tokens", default=64)
    add_number(engine, "--prefill-tokens", "of the long prompt", default=6000)
    add_number(engine, "--repeats", "medians of so many", default=3)
    add_peer_python(engine, "vLLM for the CPU")
    add_run(engine, run_engine)
    serve = benchmarks.add_parser(
        "serve",
        help="what clients of a server wait for: shared prefixes, chats of several turns",
    )
    add_serve_options(serve)
    add_run(serve, run_serve)
    transfer = benchmarks.add_parser(
        "transfer",
        help="reads from a peer's memory against the machine's own; prefill to decode",
    )
    add_transfer_options(transfer)
    add_run(transfer, run_transfer)
    engines = benchmarks.add_parser(
        "engines",
        help="what connectors cost vLLM, idle and after a restart from disk, beside each other",
    )
    add_engines_options(engines)
    add_run(engines, run_engines)
    identity = benchmarks.add_parser(
        "identity",
        help="what it costs to know what computed a block: names, canary, checksums, vLLM's steps",
    )
    add_identity_options(identity)
    add_run(identity, run_identity)
    _add_blocks(benchmarks)
    _add_dead(benchmarks)
    _add_kernels(benchmarks)


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
    add_number(dead, "--dead-s", "a store is dead at least so long", default=15.0, metavar="S")
    add_number(dead, "--lookup-timeout-ms", default=20.0, metavar="MS")
    dead.add_argument("--directory", type=Path, metavar="DIR", help="for scratch files")
    add_run(dead, run_dead)


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
    add_run(kernels, run_kernels)


def _add_blocks(benchmarks: Subparsers) -> None:
    blocks = benchmarks.add_parser(
        "blocks",
        help="the block manager against vLLM's and SGLang's, and how its cost grows",
        description="""\
Measure the block manager alone, without a model: prompts that are cached as a whole, prompts that
are new, mixed traffic, block keys, growth and memory. vLLM and SGLang serve the same traffic in the
interpreters given, in turns with kvconnect.""",
    )
    about = "vLLM or SGLang; may be given several times"
    add_peer_python(blocks, about, action="append", default=[])
    add_number(blocks, "--tokens", "of long prompts", default=131_072)
    add_number(blocks, "--requests", "of the mixed traffic", default=10_000)
    add_number(blocks, "--cached-blocks", "of the largest pool", default=1_000_000)
    add_number(blocks, "--rounds", "medians of so many", default=5)
    add_run(blocks, run_blocks)


def run_engine(arguments: argparse.Namespace) -> None:
    """Measures the engine's throughput."""
    from kvconnect.bench.report import render
    from kvconnect.bench.workload import bench_model
    from kvconnect_bench.throughput import ThroughputPlan, throughput

    numbers = ("requests", "prompt_tokens", "max_tokens", "prefill_tokens", "repeats")
    require_at_least_one(arguments, *numbers)
    plan = ThroughputPlan(**picked(arguments, *numbers))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        model = bench_model(arguments.model, Path(name))
        figures = throughput(model, plan, arguments.peer_python)
    print(render("engine", figures, as_json=arguments.json))


def run_blocks(arguments: argparse.Namespace) -> None:
    """Measures the block manager beside its peers."""
    from kvconnect.bench.report import render
    from kvconnect_bench.blocks.comparison import compare, growth, memory
    from kvconnect_bench.blocks.peers import OWN, open_field
    from kvconnect_bench.blocks.plan import BlocksPlan

    plan = BlocksPlan(**picked(arguments, "tokens", "requests", "cached_blocks", "rounds"))
    with open_field(arguments.peer_python) as field:
        for sentence in field.left_out:
            tell(sentence)
        figures = compare(field, plan, tell)
        figures += growth(field.parties[OWN], plan, tell)
    figures += memory(plan, tell)
    print(render("blocks", figures, as_json=arguments.json))


def run_dead(arguments: argparse.Namespace) -> None:
    """Measures what dead stores cost.

    Raises:
        ConfigurationError: an option is wrong; the message names it and what is right.
    """
    from kvconnect.bench.report import render
    from kvconnect_bench.dead.run import DeadPlan, dead_stores
    from kvconnect_bench.servers.mortal import SERVERS

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
    """Measures the copies of blocks."""
    from kvconnect.bench.report import render
    from kvconnect_bench.kernels.run import kernels

    require_at_least_one(arguments, "mib", "repeats")
    figures = kernels(nbytes=arguments.mib << 20, repeats=arguments.repeats, tell=tell)
    print(render("kernels", figures, as_json=arguments.json))
