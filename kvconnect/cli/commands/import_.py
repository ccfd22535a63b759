"""The command ``kvconnect import``: saves the blocks of an exported file to a store."""

from __future__ import annotations

import argparse

from kvconnect.cli.command import add_json
from kvconnect.cli.visit import add_url
from kvconnect.cli.wanted import add_model_revision, report
from kvconnect.operations.prompt_store import PromptStore

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``import``."""
    parser.description = (
        "Save the blocks of a file of 'kvconnect export' to a store, which is made if needed. "
        "First the whole file is checked: one that was changed anywhere is refused before "
        "anything is saved. What is there already is skipped, so the same command continues after "
        "an interruption. An engine uses the blocks if it runs the same model with the same "
        "settings of the cache, salt and adapter."
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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Saves the blocks, and prints the result, also after Ctrl-C.

    Raises:
        BadFrame: the file is damaged, cut short, changed, or made with another key.
        ConfigurationError: it cannot be opened, or is of another model.
    """
    from kvconnect.operations.saving import Saved

    store = PromptStore(arguments.url, arguments.model, model_revision=arguments.model_revision)
    done = Saved()
    try:
        store.import_(arguments.file, key_file=arguments.key_file, into=done)
    finally:
        report(arguments, done, "imported", f"{done.present} were there already")
