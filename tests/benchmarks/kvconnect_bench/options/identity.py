"""The options of ``kvconnect bench identity``, and the plan that is made from them."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from kvconnect.cli.command import add_number, chosen, picked, require_at_least_one, tell
from kvconnect.errors import ConfigurationError
from kvconnect_bench.identity.plan import PARTS, IdentityPlan
from kvconnect_bench.peer_python import add_peer_python

__all__ = ["add_identity_options", "run_identity"]


def add_identity_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``bench identity``."""
    parser.description = """\
Measure what it costs to know what computed a block: naming a model by what is in memory against
loading it; the check that it is unchanged against a decode step; checksums of a transfer against
the same transfer without them, and over links of a known rate; and what watching its weights adds
to a step of vLLM."""
    names = ",".join(PARTS)
    parser.add_argument("--parts", default=names, metavar="NAME,…", help=f"default: {names}")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="default: a random Llama of 46 million parameters"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the weights (default: bfloat16)")
    add_number(parser, "--prompt-tokens", default=512)
    add_number(parser, "--repeats", default=5)
    add_peer_python(parser, "vLLM, without which the part vllm is left out")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="for scratch files, on the disk to measure"
    )


def run_identity(arguments: argparse.Namespace) -> None:
    """Measures what names cost.

    Raises:
        ConfigurationError: an option is wrong; the message names it and what is right.
    """
    from kvconnect.bench.report import render
    from kvconnect.bench.workload import bench_model
    from kvconnect_bench.identity.run import bench_identity

    require_at_least_one(arguments, "prompt_tokens", "repeats")
    plan = IdentityPlan(
        parts=chosen("--parts", arguments.parts, PARTS),
        **picked(arguments, "dtype", "prompt_tokens", "repeats", "peer_python"),
    )
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        model = bench_model(arguments.model, Path(name))
        figures = bench_identity(model, Path(name), plan, tell)
    if not figures:
        raise ConfigurationError("bench identity: nothing of what was asked for can be measured")
    print(render("identity", figures, as_json=arguments.json))
