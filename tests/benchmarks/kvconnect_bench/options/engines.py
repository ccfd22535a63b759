"""The command ``kvconnect bench engines``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvconnect.bench.report import Figure
from kvconnect.bench.workload import model_and_scratch
from kvconnect.cli.command import add_number, chosen, picked, require_at_least_one, tell
from kvconnect.cli.commands.bench import add_model_options
from kvconnect_bench.engines.plan import CONNECTORS, EnginesPlan
from kvconnect_bench.peer_python import add_peer_python


def add_options(parser: argparse.ArgumentParser) -> None:
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
    add_model_options(parser)


def measure(arguments: argparse.Namespace) -> Sequence[Figure]:
    """Returns the figures of ``bench engines``.

    Raises:
        ConfigurationError: an option is wrong; the message names it and what is right.
    """
    from kvconnect_bench.engines.run import bench_engines

    numbers = ("prompt_tokens", "steps", "repeats")
    require_at_least_one(arguments, *numbers)
    connectors = chosen("--connectors", arguments.connectors, CONNECTORS)
    plan = EnginesPlan(connectors=connectors, **picked(arguments, *numbers))
    with model_and_scratch(arguments.model, arguments.directory) as (model, scratch):
        return bench_engines(model, scratch, plan, arguments.peer_python, tell)
