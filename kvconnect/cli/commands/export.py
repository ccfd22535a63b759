"""The command ``kvconnect export``: writes blocks of a store to one file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from kvconnect.address import is_http_url
from kvconnect.cli.command import NothingMatched, add_json
from kvconnect.cli.options.http_options import ADMIN_KEY
from kvconnect.cli.wanted import add_wanted, reported, store_and_wanted, wanted_of_server
from kvconnect.errors import ConfigurationError
from kvconnect.operations.result import Exported


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``export``."""
    parser.description = (
        "Write the blocks of prompts, of a tenant or of a whole store to one file, for 'kvconnect "
        "import' elsewhere. Until it is complete its name ends in .part; after an interruption the "
        "same command continues it. Every block is checked: a bad one is left out, and the exit "
        "code is 1. The file holds prompts as they are stored; its owner alone may read it. URL "
        "may be that of a 'kvconnect serve', http://host:8000, whose store is meant then; its "
        f"admin key comes from {ADMIN_KEY}, and MODEL is its name of the model."
    )
    add_wanted(parser)
    parser.add_argument("--output", "-o", required=True, metavar="FILE", help="the file to write")
    parser.add_argument(
        "--key-file",
        metavar="F",
        help="a file with a secret of 32 bytes or more: 'import' with the same one refuses a file "
        "that anybody else made",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    """Writes the file, and prints the result, also after Ctrl-C.

    Raises:
        ConfigurationError: no option chooses blocks to export.
        NothingMatched: the store has none of the blocks.
        BadFrame: damaged blocks were left out.
    """
    with reported(arguments, Exported(), "exported") as done:
        (_by_server if is_http_url(arguments.url) else _export)(arguments, done)
    if not done.blocks:
        raise NothingMatched("no block matched")


def _export(arguments: argparse.Namespace, done: Exported) -> None:
    store, which = store_and_wanted(arguments)
    store.export(arguments.output, key_file=arguments.key_file, into=done, **which)


def _by_server(arguments: argparse.Namespace, done: Exported) -> None:
    from kvconnect.operations.remote import export_by_server

    if arguments.model_revision is not None:
        raise ConfigurationError("--model-revision: a server knows its own")
    body = wanted_of_server(arguments)
    if arguments.key:
        body["keys"] = arguments.key
    if arguments.model is not None:
        body["model"] = arguments.model
    if arguments.all:
        body |= {"everything": True, "all_models": arguments.model is None}
    export_by_server(
        arguments.url,
        body,
        Path(arguments.output),
        done,
        admin_key=os.environ.get(ADMIN_KEY),
        key_file=arguments.key_file,
    )
