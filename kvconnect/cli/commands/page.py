"""The command ``kvconnect page``: shows a store in a browser."""

from __future__ import annotations

import argparse
from contextlib import closing

from kvconnect.backends.main_loop import run_to_end
from kvconnect.backends.url import StoreUrl
from kvconnect.cli.command import add_tenants, add_url
from kvconnect.cli.options.http_options import add_http_options, add_key, http_fields, key_of
from kvconnect.cli.wanted import add_model_revision
from kvconnect.errors import ConfigurationError
from kvconnect.operations.overview import store_overview
from kvconnect.operations.tenants import read_names

_EPILOG = """\
examples:
  kvconnect page disk:///var/cache/kv
  KVCONNECT_ADMIN_KEY=... kvconnect page redis://host MODEL --port 0
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``page``."""
    parser.description = (
        "Show a store in a browser: its tiers, its tenants, and its prompts as a tree to open "
        "branch by branch. The store is only read, and nothing is sent to other machines. It is "
        "listed once, when the page is opened, and again on request. Tokens, keys and the digests "
        "of salts are shown to those who enter the admin key. `kvconnect serve --page` shows a "
        "server's hits, too."
    )
    parser.epilog = _EPILOG
    add_url(parser)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="show the texts of this model's blocks, not only token ids: its directory, or its "
        "name in the Hugging Face cache",
    )
    add_model_revision(parser)
    group = parser.add_argument_group("page")
    add_http_options(group)
    add_key(group, "admin", "what a reader of tokens, keys and digests of salts must enter")
    add_tenants(group, "the holder of that key")


def run(arguments: argparse.Namespace) -> None:
    """Serves the page until a signal.

    Raises:
        ConfigurationError: a bad option, URL, model, host or port.
        BackendUnavailable: the store cannot be reached.
    """
    title = str(StoreUrl.parse(arguments.url))
    names = {} if arguments.tenants is None else read_names(arguments.tenants)
    from kvconnect.server.http.listener import Listener
    from kvconnect.server.page.cache_page import serve_page
    from kvconnect.server.page.store_reader import ModelTexts, StoreReader
    from kvconnect.server.settings import PageSettings

    run_to_end(store_overview(arguments.url))  # reports a wrong or dead store at once
    texts = None
    if arguments.model is not None:
        texts = ModelTexts.of(arguments.model, arguments.model_revision)
    elif arguments.model_revision is not None:
        raise ConfigurationError("--model-revision: needs MODEL")
    settings = PageSettings(**http_fields(arguments), admin_key=key_of(arguments, "admin"))
    with closing(Listener.bind(settings)) as listener:
        serve_page(
            title,
            StoreReader(arguments.url, names, texts),
            settings,
            listener,
            ready=lambda: print(f"kvconnect: {title} on {listener.url}/page", flush=True),
        )
