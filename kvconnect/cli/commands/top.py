"""The command ``kvconnect top``: the numbers of a server or a store, again and again."""

from __future__ import annotations

import argparse
import json
import re
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from kvconnect.backends.main_loop import run_to_end
from kvconnect.backends.url import StoreUrl
from kvconnect.cli.command import add_duration, add_json
from kvconnect.cli.options.http_options import add_key, key_of
from kvconnect.errors import BackendUnavailable, ConfigurationError, MissingExtra, RetryLater
from kvconnect.operations.overview import store_overview
from kvconnect.prometheus.overview import Overview
from kvconnect.redaction import without_passwords

if TYPE_CHECKING:
    from rich.live import Live

_SERVER = "http://127.0.0.1:8000"
_HOST_AND_PORT = re.compile(r"[A-Za-z0-9.-]+:[0-9]{1,5}")
_EPILOG = """\
examples:
  kvconnect top                              # of the server on this machine's port 8000
  kvconnect top http://host:9464 --interval 10s
  kvconnect top disk:///var/cache/kv --once --json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``top``."""
    parser.description = (
        "Show the numbers of a server, or of a store alone, in a terminal: hit rate and ceiling, "
        "lost tokens by reason, tiers with capacity and throughput. They are read from the "
        "server's /metrics, also those of vLLM and others with kvconnect's adapter. Ctrl-C ends it."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "url",
        nargs="?",
        default=_SERVER,
        metavar="URL",
        help=f"of a server, or of a store (default: {_SERVER})",
    )
    add_duration(parser, "--interval", "between two looks", default="2s")
    parser.add_argument(
        "--once",
        action="store_true",
        help="show the numbers once, as where the output is no terminal",
    )
    add_key(
        parser,
        "api",
        "what the server's /metrics needs: its API key, or its metrics key if it has one",
    )
    add_json(parser, "look")


def run(arguments: argparse.Namespace) -> None:
    """Shows the numbers until Ctrl-C, or once.

    Raises:
        ConfigurationError: a bad URL or key, or a server without kvconnect's metrics.
        BackendUnavailable: the first look does not reach the server or the store.
    """
    if _HOST_AND_PORT.fullmatch(arguments.url):
        raise ConfigurationError(
            f"'{arguments.url}' is no URL; of a server give http://{arguments.url}"
        )
    key = key_of(arguments, "api")
    if arguments.json:
        _print_json(arguments, key)
        return
    try:
        from rich.console import Console
        from rich.live import Live

        from kvconnect.cli.top_view import view
    except ModuleNotFoundError as error:
        raise MissingExtra("kvconnect top without --json", "top") from error
    console = Console()
    shown = _shown(arguments.url)
    earlier = _look(arguments.url, key)
    if arguments.once or not console.is_terminal:
        console.print(view(shown, earlier, None))
        return
    screen: AbstractContextManager[Live] = Live(
        view(shown, earlier, None), console=console, screen=True, auto_refresh=False
    )
    with screen as live:
        while True:
            time.sleep(arguments.interval_s)
            try:
                now, problem = _look(arguments.url, key), None
            except (BackendUnavailable, RetryLater) as error:
                now, problem = earlier, str(error)
            live.update(view(shown, now, earlier, problem), refresh=True)
            earlier = now


def _print_json(arguments: argparse.Namespace, key: str | None) -> None:
    while True:
        print(json.dumps(_look(arguments.url, key).as_json()), flush=True)
        if arguments.once:
            return
        time.sleep(arguments.interval_s)


def _look(url: str, api_key: str | None) -> Overview:
    if _is_server(url):
        from kvconnect.operations.remote import server_overview  # imports torch

        return server_overview(url, api_key=api_key)
    return run_to_end(store_overview(url))


def _is_server(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _shown(url: str) -> str:
    """Returns `url` without passwords."""
    return without_passwords(url) if _is_server(url) else str(StoreUrl.parse(url))
