"""The command ``kvconnect bench serve``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from kvconnect.bench.report import Figure
from kvconnect.bench.workload import model_and_scratch
from kvconnect.cli.command import add_number, picked, require_at_least_one
from kvconnect.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    from kvconnect_bench.serve.workload import Workload

_COUNTS = ("requests", "prefixes", "chats", "turns", "suffix_tokens", "max_tokens", "concurrency")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``bench serve``."""
    server = parser.add_argument_group("server")
    server.add_argument("--model", type=Path, metavar="DIR", help="default: a random Llama")
    server.add_argument("--store", metavar="URL", help="of the server that is started")
    server.add_argument("--url", metavar="URL", help="of one that runs, and not one of its own")
    server.add_argument("--served-model-name", metavar="NAME", help="of the model there")
    server.add_argument("--directory", type=Path, metavar="DIR", help="for scratch files")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--workload",
        choices=("prefixes", "chats"),
        default="prefixes",
        help="prompts that share prefixes (default), or chats of several turns",
    )
    add_number(load, "--requests", "that share prefixes", default=64)
    add_number(load, "--prefixes", "that they share", default=8)
    add_number(load, "--chats", default=8)
    add_number(load, "--turns", "of each chat", default=4)
    add_number(load, "--prefix-tokens", "of each prefix, or of all chats' one", default=512)
    add_number(load, "--suffix-tokens", "that follow, of each turn", default=64)
    add_number(load, "--max-tokens", "of each answer", default=32)
    add_number(load, "--concurrency", "clients at once", default=8)
    add_number(load, "--seed", "of all texts", default=0)
    load.add_argument(
        "--write-prompts",
        type=Path,
        metavar="FILE",
        help="of the workload prefixes, as lines of JSON: what `vllm bench serve --dataset-name "
        "custom` takes",
    )


def measure(arguments: argparse.Namespace) -> Sequence[Figure]:
    """Returns the figures of ``bench serve``.

    Raises:
        ConfigurationError: an option is wrong; the message names it and what is right.
    """
    try:
        from kvconnect_bench.serve import run
    except ModuleNotFoundError as error:
        if error.name != "httpx2":
            raise
        raise MissingExtra("bench serve", "serve") from error
    from kvconnect_bench.serve.server import MODEL_NAME, started_server

    require_at_least_one(arguments, *_COUNTS)
    workload = _workload(arguments)
    if arguments.write_prompts is not None:
        _write_prompts(arguments.write_prompts, workload)
    with ExitStack() as stack:
        if arguments.url is None:
            model, _ = stack.enter_context(model_and_scratch(arguments.model, arguments.directory))
            store = () if arguments.store is None else ("--store", arguments.store)
            url = stack.enter_context(started_server(model, store))
            target = run.Target(url, MODEL_NAME, os.environ.get("KVCONNECT_API_KEY"))
        elif arguments.served_model_name is None:
            raise ConfigurationError("--url: give --served-model-name, too")
        else:
            key = os.environ.get("KVCONNECT_API_KEY")
            target = run.Target(arguments.url.rstrip("/"), arguments.served_model_name, key)
        return run.measure(target, workload, arguments.concurrency)


def _workload(arguments: argparse.Namespace) -> Workload:
    from kvconnect_bench.serve.workload import Chats, SharedPrefixes

    common = picked(arguments, "prefix_tokens", "suffix_tokens", "max_tokens", "seed")
    if arguments.workload == "chats":
        return Chats(**picked(arguments, "chats", "turns"), **common)
    return SharedPrefixes(**picked(arguments, "requests", "prefixes"), **common)


def _write_prompts(file: Path, workload: Workload) -> None:
    from kvconnect_bench.serve.workload import SharedPrefixes

    if not isinstance(workload, SharedPrefixes):
        raise ConfigurationError("--write-prompts: is for --workload prefixes")
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in workload.prompts()]
    try:
        file.write_text("".join(lines))
    except OSError as error:
        raise ConfigurationError(f"--write-prompts {file}: {error.strerror}") from error
