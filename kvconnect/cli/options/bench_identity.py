"""``kvconnect bench identity``: its options, and from them its plan."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from kvconnect.bench.identity.plan import PARTS, IdentityPlan
from kvconnect.cli.command import add_number, picked
from kvconnect.errors import ConfigurationError, nearest

__all__ = ["add_identity_options", "run_identity"]


def add_identity_options(parser: argparse.ArgumentParser) -> None:
    """Describes ``bench identity``."""
    parser.description = """\
Measure what it costs to know what computed a block: naming a model by what is in memory against
loading it, and the check that it is unchanged against a decode step."""
    names = ",".join(PARTS)
    parser.add_argument("--parts", default=names, metavar="NAME,…", help=f"default: {names}")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="default: a random Llama of 46 million parameters"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the weights (default: bfloat16)")
    add_number(parser, "--prompt-tokens", "(default: 512)", default=512)
    add_number(parser, "--repeats", "(default: 5)", default=5)
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="for the model, on the disk to measure"
    )


def run_identity(arguments: argparse.Namespace) -> None:
    """Measures what names cost.

    Raises:
        ConfigurationError: names the option and what is right.
    """
    from kvconnect.bench.identity.run import bench_identity
    from kvconnect.bench.report import render
    from kvconnect.bench.workload import bench_model

    for name in ("prompt_tokens", "repeats"):
        if getattr(arguments, name) < 1:
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"{option} {getattr(arguments, name)}: must be at least 1")
    parts = tuple(dict.fromkeys(arguments.parts.split(",")))
    for name in parts:
        if name not in PARTS:
            raise ConfigurationError(f"--parts {name}: {nearest(name, PARTS)}")
    plan = IdentityPlan(parts=parts, **picked(arguments, "dtype", "prompt_tokens", "repeats"))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        model = bench_model(arguments.model, Path(name))
        figures = bench_identity(model, plan, _tell)
    print(render("identity", figures, as_json=arguments.json))


def _tell(what: str) -> None:
    print(f"kvconnect: {what}", file=sys.stderr, flush=True)
