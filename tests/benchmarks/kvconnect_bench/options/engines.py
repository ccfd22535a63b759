"""The options of ``kvconnect bench engines``, and the plan that is made from them."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from kvconnect.cli.command import add_number, chosen, picked, require_at_least_one, tell
from kvconnect_bench.engines.plan import CONNECTORS, EnginesPlan
from kvconnect_bench.peer_python import add_peer_python

__all__ = ["add_engines_options", "run_engines"]


def add_engines_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``bench engines``."""
    parser.description = """\
Run vLLM with nothing, with kvconnect's connector and tier, and with others' beside them: what each
adds to a step on the scheduler's thread, and how long after a restart from disk the first token
takes, against the floor of the same run."""
    about = "vLLM: make test-engines makes .venv-engines/vllm"
    add_peer_python(parser, about, required=True)
    names = ",".join(CONNECTORS)
    parser.add_argument("--connectors", default=names, metavar="NAME,…", help=f"default: {names}")
    add_number(parser, "--prompt-tokens", default=4096)
    add_number(parser, "--steps", "of decoding", default=200)
    add_number(parser, "--repeats", "restarts", default=3)
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="default: a random Llama of 46 million parameters"
    )
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="for scratch files, on the disk to measure"
    )


def run_engines(arguments: argparse.Namespace) -> None:
    """Measures connectors.

    Raises:
        ConfigurationError: an option is wrong; the message names it and what is right.
    """
    from kvconnect.bench.report import render
    from kvconnect.bench.workload import bench_model
    from kvconnect_bench.engines.run import bench_engines

    numbers = ("prompt_tokens", "steps", "repeats")
    require_at_least_one(arguments, *numbers)
    connectors = chosen("--connectors", arguments.connectors, CONNECTORS)
    plan = EnginesPlan(connectors=connectors, **picked(arguments, *numbers))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        scratch = Path(name)
        model = bench_model(arguments.model, scratch)
        figures = bench_engines(model, scratch, plan, arguments.peer_python, tell)
    print(render("engines", figures, as_json=arguments.json))
