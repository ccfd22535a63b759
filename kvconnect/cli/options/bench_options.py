"""The options that benchmarks have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

__all__ = ["add_model_options", "add_run"]


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
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
