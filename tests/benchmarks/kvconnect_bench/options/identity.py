"""The command ``kvconnect bench identity``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvconnect.bench.report import Figure
from kvconnect.bench.workload import model_and_scratch
from kvconnect.cli.command import add_number, chosen, picked, require_at_least_one, tell
from kvconnect.cli.commands.bench import add_model_options
from kvconnect_bench.identity.plan import PARTS, IdentityPlan
from kvconnect_bench.peer_python import add_peer_python


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``bench identity``."""
    parser.description = """\
Measure what it costs to know what computed a block: naming a model by what is in memory against
loading it; the check that it is unchanged against a decode step; checksums of a transfer against
the same transfer without them, and over links of a known rate; and what watching its weights adds
to a step of vLLM."""
    names = ",".join(PARTS)
    parser.add_argument("--parts", default=names, metavar="NAME,…", help=f"default: {names}")
    add_model_options(parser)
    parser.add_argument(
        "--dtype", default="bfloat16", metavar="D", help="of the weights (default: bfloat16)"
    )
    add_number(parser, "--prompt-tokens", default=512)
    add_number(parser, "--repeats", default=5)
    add_peer_python(parser, "vLLM, without which the part vllm is left out")


def measure(arguments: argparse.Namespace) -> Sequence[Figure]:
    """Returns the figures of ``bench identity``.

    Raises:
        ConfigurationError: an option is wrong; the message names it and what is right.
    """
    from kvconnect_bench.identity.run import bench_identity

    require_at_least_one(arguments, "prompt_tokens", "repeats")
    plan = IdentityPlan(
        parts=chosen("--parts", arguments.parts, PARTS),
        **picked(arguments, "dtype", "prompt_tokens", "repeats", "peer_python"),
    )
    with model_and_scratch(arguments.model, arguments.directory) as (model, scratch):
        return bench_identity(model, scratch, plan, tell)
