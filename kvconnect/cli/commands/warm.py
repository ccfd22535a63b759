"""The command ``kvconnect warm``: computes and saves the blocks of prompts that a store lacks."""

from __future__ import annotations

import argparse
import os

from kvconnect.backends.main_loop import run_to_end
from kvconnect.cli.command import add_json
from kvconnect.cli.options.engine_options import (
    add_cache_options,
    add_engine_options,
    check_model,
    open_llm,
)
from kvconnect.cli.options.http_options import ADMIN_KEY
from kvconnect.cli.prompts import add_prompt_options
from kvconnect.cli.wanted import given_prompts, reported, wanted_of_server
from kvconnect.errors import ConfigurationError, RetryLater
from kvconnect.operations.prompt_store import PromptStore
from kvconnect.operations.result import Saved

_EPILOG = """\
examples:
  kvconnect warm disk:///var/cache/kv MODEL --jsonl prompts.jsonl
  kvconnect warm --server http://localhost:8000 --jsonl prompts.jsonl
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``warm``."""
    parser.description = (
        "Compute what a store lacks of prompts, and save it: with MODEL, in this process, or by a "
        "running server, into the server's own store. What is there is skipped, so the same "
        "command continues after an interruption. Give the cache's options as the engines have "
        "them that are to load the blocks."
    )
    parser.epilog = _EPILOG
    parser.add_argument("url", nargs="?", metavar="URL", help="of a store; not with --server")
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="its directory or name; not with --server"
    )
    parser.add_argument(
        "--server",
        metavar="URL",
        help=f"of a 'kvconnect serve' that is to do it; its admin key comes from {ADMIN_KEY}",
    )
    group = parser.add_argument_group("which prompts")
    add_prompt_options(group)
    group.add_argument("--salt", metavar="TEXT", help="under this cache_salt")
    group.add_argument("--lora", metavar="ID", help="of requests with this adapter")
    add_json(parser)
    add_cache_options(parser, store=False)
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> None:
    """Warms, and prints the result, also after Ctrl-C.

    Raises:
        ConfigurationError: a bad option, an unusable model or store, or a refusal of the server.
        BackendUnavailable: the store or the server cannot be reached.
        RetryLater: some blocks were not saved.
    """
    if (arguments.server is None) == (arguments.url is None):
        raise ConfigurationError("warm: give URL and MODEL, or --server")
    with reported(arguments, Saved(), "saved") as done:
        (_by_model if arguments.server is None else _by_server)(arguments, done)
    if not done.complete:
        raise RetryLater("some blocks were not saved; the store is full, or fails")


def _by_model(arguments: argparse.Namespace, done: Saved) -> None:
    from kvconnect.operations.warm import check_store, connector_to

    if arguments.model is None:
        raise ConfigurationError("warm: MODEL is needed with URL")
    check_model(arguments.model)
    store = PromptStore(arguments.url, arguments.model, model_revision=arguments.model_revision)
    which = given_prompts(arguments, store)
    run_to_end(check_store(arguments.url))
    with open_llm(arguments, connector=connector_to(arguments.url)) as llm:
        store.warm(llm, into=done, **which)


def _by_server(arguments: argparse.Namespace, done: Saved) -> None:
    from kvconnect.operations.remote import warm_by_server

    body = wanted_of_server(arguments)
    warm_by_server(arguments.server, body, done, admin_key=os.environ.get(ADMIN_KEY))
