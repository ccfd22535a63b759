"""The options of commands that answer over HTTP."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from kvconnect.backends.url import parse_size
from kvconnect.cli.command import Options, add_number, picked
from kvconnect.errors import MissingExtra

if TYPE_CHECKING:
    from kvconnect.server.http.listener import Listener

__all__ = ["ROUTER_SECRET", "add_http_options", "http_fields", "missing_extra", "tell_url"]

ROUTER_SECRET = "KVCONNECT_ROUTER_SECRET"  # noqa: S105  its name
_API_KEY = "KVCONNECT_API_KEY"
_EXTRA = ("httpx2", "jiter", "prometheus_client", "starlette", "uvicorn")


def add_http_options(group: Options) -> None:
    """Adds the options of the server's address, and of its limits for clients."""
    group.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="HOST",
        help="address to listen on (default: 127.0.0.1, this machine only); beyond this machine "
        "an API key is required",
    )
    add_number(group, "--port", "0: any free one", default=8000, metavar="PORT")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"what clients must send; other users of this machine see it here, and not in the "
        f"environment: {_API_KEY}",
    )
    group.add_argument(
        "--max-body", default="4MiB", metavar="SIZE", help="of one request (default: 4MiB)"
    )
    add_number(
        group,
        "--client-timeout",
        "a client may take so long to send a request, or to take what was written",
        default=60.0,
        metavar="S",
    )
    add_number(
        group,
        "--shutdown-timeout",
        "running requests may take so long when the server is stopped",
        default=30.0,
        metavar="S",
    )


def http_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of `HttpSettings` from `arguments` and the environment."""
    key = os.environ.get(_API_KEY) if arguments.api_key is None else arguments.api_key
    return {
        **picked(arguments, "host", "port"),
        "api_key": key,
        "max_body_bytes": parse_size(arguments.max_body, field="--max-body"),
        "client_timeout_s": arguments.client_timeout,
        "shutdown_timeout_s": arguments.shutdown_timeout,
    }


def missing_extra(command: str, error: ModuleNotFoundError) -> Exception:
    """Returns the error to raise: `error`, or `MissingExtra` for a package of extra ``serve``."""
    if (error.name or "").partition(".")[0] not in _EXTRA:
        return error
    return MissingExtra(f"kvconnect {command}", "serve")


def tell_url(name: str, listener: Listener) -> None:
    """Prints the URL of `name`."""
    print(f"kvconnect: {name} on {listener.url}/v1", flush=True)
