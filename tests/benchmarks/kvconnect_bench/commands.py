"""The benchmarks of ``kvconnect bench`` that are no part of the wheel."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvconnect.backends.url import parse_size
from kvconnect.bench.report import Figure, render
from kvconnect.bench.workload import model_and_scratch
from kvconnect.cli.command import (
    Subparsers,
    add_duration,
    add_number,
    chosen,
    picked,
    require_at_least_one,
    tell,
)
from kvconnect.cli.commands.bench import add_model_options, add_run
from kvconnect.cli.options.engine_options import add_lookup_timeout
from kvconnect.errors import ConfigurationError
from kvconnect_bench.options import crossover, engines, identity, serve, transfer
from kvconnect_bench.peer_python import add_peer_python


def add_benchmarks(benchmarks: Subparsers) -> None:
    """Adds the subcommands of all benchmarks of this package."""
    for name, (add_options, measure, about) in _BENCHMARKS.items():
        parser = benchmarks.add_parser(name, help=about)
        add_options(parser)
        add_run(parser, partial(_run, name, measure))


def _run(
    name: str,
    measure: Callable[[argparse.Namespace], Sequence[Figure]],
    arguments: argparse.Namespace,
) -> None:
    figures = measure(arguments)
    if not figures:
        raise ConfigurationError(f"bench {name}: nothing of what was asked for can be measured")
    print(render(name, figures, as_json=arguments.json))


def _add_engine(engine: argparse.ArgumentParser) -> None:
    add_model_options(engine)
    add_number(engine, "--requests", default=16)
    add_number(engine, "--prompt-tokens", default=64)
    add_number(engine, "--max-tokens", default=64)
    add_number(engine, "--prefill-tokens", "of the long prompt", default=6000)
    add_number(engine, "--repeats", "medians of so many", default=3)
    add_peer_python(engine, "vLLM for the CPU")


def _measure_engine(arguments: argparse.Namespace) -> Sequence[Figure]:
    from kvconnect_bench.throughput import ThroughputPlan, throughput

    numbers = ("requests", "prompt_tokens", "max_tokens", "prefill_tokens", "repeats")
    require_at_least_one(arguments, *numbers)
    plan = ThroughputPlan(**picked(arguments, *numbers))
    with model_and_scratch(arguments.model, arguments.directory) as (model, _):
        return throughput(model, plan, arguments.peer_python)


def _add_dead(dead: argparse.ArgumentParser) -> None:
    dead.description = """\
Let a redis-server and a plain S3 server die under an engine: connections refused, packets
black-holed, the process frozen. Measure how much later than without a store the first token comes,
and how long after its recovery the store is used again. Takes some minutes."""
    dead.add_argument(
        "--model", type=Path, metavar="DIR", help="default: a random Llama, as small as can be"
    )
    dead.add_argument("--stores", default="redis,s3", metavar="NAME,…", help="default: redis,s3")
    add_number(dead, "--prompt-tokens", default=64)
    add_number(dead, "--requests", "to a store that is left alone", default=200)
    add_duration(dead, "--dead", "a store is dead at least so long", default="15s")
    add_lookup_timeout(dead)
    dead.add_argument("--directory", type=Path, metavar="DIR", help="for scratch files")


def _measure_dead(arguments: argparse.Namespace) -> Sequence[Figure]:
    from kvconnect_bench.dead.run import DeadPlan, dead_stores
    from kvconnect_bench.servers.mortal import SERVERS

    require_at_least_one(arguments, "prompt_tokens", "requests")
    stores = chosen("--stores", arguments.stores, SERVERS)
    plan = DeadPlan(
        budget_ms=arguments.lookup_timeout_ms,
        **picked(arguments, "prompt_tokens", "requests", "dead_s"),
    )
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        return dead_stores(arguments.model, Path(name), stores, plan, tell)


def _add_kernels(kernels: argparse.ArgumentParser) -> None:
    kernels.description = """\
Measure the copies of KV blocks as shares of one copy of the same bytes without gaps, in the same
run: in host memory against memcpy, with one thread each; on a CUDA device and over its link, if
there is one."""
    kernels.add_argument(
        "--total",
        default="64MiB",
        metavar="SIZE",
        help="copied in one measurement on the host (default: 64MiB)",
    )
    add_number(kernels, "--repeats", "medians of so many", default=9)


def _measure_kernels(arguments: argparse.Namespace) -> Sequence[Figure]:
    from kvconnect_bench.kernels.run import kernels

    require_at_least_one(arguments, "repeats")
    nbytes = parse_size(arguments.total, field="--total")
    return kernels(nbytes=nbytes, repeats=arguments.repeats, tell=tell)


def _add_blocks(blocks: argparse.ArgumentParser) -> None:
    blocks.description = """\
Measure the block manager alone, without a model: prompts that are cached as a whole, prompts that
are new, mixed traffic, block keys, growth and memory. vLLM and SGLang serve the same traffic in the
interpreters given, in turns with kvconnect."""
    about = "vLLM or SGLang; may be given several times"
    add_peer_python(blocks, about, action="append", default=[])
    add_number(blocks, "--tokens", "of long prompts", default=131_072)
    add_number(blocks, "--requests", "of the mixed traffic", default=10_000)
    add_number(blocks, "--cached-blocks", "of the largest pool", default=1_000_000)
    add_number(blocks, "--rounds", "medians of so many", default=5)


def _measure_blocks(arguments: argparse.Namespace) -> Sequence[Figure]:
    from kvconnect_bench.blocks.comparison import compare, growth, memory
    from kvconnect_bench.blocks.peers import OWN, open_field
    from kvconnect_bench.blocks.plan import BlocksPlan

    plan = BlocksPlan(**picked(arguments, "tokens", "requests", "cached_blocks", "rounds"))
    with open_field(arguments.peer_python) as field:
        for sentence in field.left_out:
            tell(sentence)
        figures = compare(field, plan, tell)
        figures += growth(field.parties[OWN], plan, tell)
    return figures + memory(plan, tell)


_BENCHMARKS = {
    "engine": (
        _add_engine,
        _measure_engine,
        "many requests at once against one, a long prompt; and vLLM's engine beside it",
    ),
    "serve": (
        serve.add_options,
        serve.measure,
        "what clients of a server wait for: shared prefixes, chats of several turns",
    ),
    "transfer": (
        transfer.add_options,
        transfer.measure,
        "reads from a peer's memory against the machine's own; prefill to decode",
    ),
    "engines": (
        engines.add_options,
        engines.measure,
        "what connectors cost vLLM, idle and after a restart from disk, beside each other",
    ),
    "identity": (
        identity.add_options,
        identity.measure,
        "what it costs to know what computed a block: names, canary, checksums, vLLM's steps",
    ),
    "blocks": (
        _add_blocks,
        _measure_blocks,
        "the block manager against vLLM's and SGLang's, and how its cost grows",
    ),
    "dead": (
        _add_dead,
        _measure_dead,
        "what a store that dies costs requests, and how soon it is used again",
    ),
    "crossover": (
        crossover.add_options,
        crossover.measure,
        "prompts from stores slower and faster than the model: computed, loaded, from both ends",
    ),
    "kernels": (
        _add_kernels,
        _measure_kernels,
        "copies of KV blocks against what memory and links can do",
    ),
}
