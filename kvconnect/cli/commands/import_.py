"""The command ``kvconnect import``: saves the blocks of an exported file to a store."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from kvconnect.address import is_http_url
from kvconnect.cli.command import add_json, add_url
from kvconnect.cli.options.http_options import ADMIN_KEY
from kvconnect.cli.wanted import add_model_revision, reported
from kvconnect.errors import ConfigurationError
from kvconnect.operations.prompt_store import PromptStore
from kvconnect.operations.result import Saved


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``import``."""
    parser.description = (
        "Save the blocks of a file of 'kvconnect export' to a store, which is made if needed. "
        "First the whole file is checked: one that was changed anywhere is refused before "
        "anything is saved. What is there already is skipped, so the same command continues after "
        "an interruption. An engine uses the blocks if it runs the same model with the same "
        "settings of the cache, salt and adapter. URL may be that of a 'kvconnect serve', "
        "http://host:8000: it saves them to its own store, after it has checked the whole file; "
        f"its admin key comes from {ADMIN_KEY}."
    )
    add_url(parser)
    parser.add_argument("file", metavar="FILE", help="a file of 'kvconnect export'")
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="refuse a file of another model: the model's directory, its name in the Hugging Face "
        "cache, or the first digits of its digest",
    )
    add_model_revision(parser)
    parser.add_argument("--key-file", metavar="F", help="the key file that it was made with")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    """Saves the blocks, and prints the result, also after Ctrl-C.

    Raises:
        BadFrame: the file is damaged, cut short, changed, or made with another key.
        ConfigurationError: the file cannot be opened, or is of another model.
    """
    with reported(arguments, Saved(), "imported") as done:
        (_by_server if is_http_url(arguments.url) else _import)(arguments, done)


def _import(arguments: argparse.Namespace, done: Saved) -> None:
    store = PromptStore(arguments.url, arguments.model, model_revision=arguments.model_revision)
    store.import_(arguments.file, key_file=arguments.key_file, into=done)


def _by_server(arguments: argparse.Namespace, done: Saved) -> None:
    from kvconnect.operations.remote import import_by_server

    if arguments.model or arguments.model_revision or arguments.key_file:
        raise ConfigurationError(
            "MODEL, --model-revision, --key-file: a server does not take them; give the URL of its "
            "store"
        )
    key = os.environ.get(ADMIN_KEY)
    import_by_server(arguments.url, Path(arguments.file), done, admin_key=key)
