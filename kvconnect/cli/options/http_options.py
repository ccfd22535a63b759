"""The options of commands that answer over HTTP."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from kvconnect.backends.url import parse_size
from kvconnect.cli.command import Options, add_duration, add_number, picked
from kvconnect.cli.options.traces_options import add_traces_option
from kvconnect.errors import MissingExtra

if TYPE_CHECKING:
    from kvconnect.server.http.listener import Listener

__all__ = [
    "ADMIN_KEY",
    "API_KEY",
    "METRICS_KEY",
    "ROUTER_SECRET",
    "add_admin_key",
    "add_api_key",
    "add_http_options",
    "admin_key",
    "http_fields",
    "missing_extra",
    "tell_url",
]

ROUTER_SECRET = "KVCONNECT_ROUTER_SECRET"  # noqa: S105  its name
ADMIN_KEY = "KVCONNECT_ADMIN_KEY"
METRICS_KEY = "KVCONNECT_METRICS_KEY"
API_KEY = "KVCONNECT_API_KEY"
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
    add_api_key(group, "what clients must send")
    group.add_argument(
        "--max-body", default="4MiB", metavar="SIZE", help="of one request (default: 4MiB)"
    )
    add_duration(
        group,
        "--client-timeout",
        "a client may take so long to send a request, or to take what was written",
        default="60s",
    )
    add_duration(
        group,
        "--shutdown-timeout",
        "running requests may take so long when the server is stopped",
        default="30s",
        zero=True,
    )
    group.add_argument(
        "--access-log",
        action="store_true",
        help="log a line for each answer: its client, path, status and time",
    )
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="of the log on standard error: lines, or a JSON object on each (default: text)",
    )
    add_traces_option(group)


def add_api_key(group: Options, about: str) -> None:
    """Adds the option of an API key."""
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"{about}; other users of this machine see it here, and not in the environment: "
        f"{API_KEY}",
    )


def add_admin_key(group: Options, about: str) -> None:
    """Adds the option that `admin_key` reads."""
    group.add_argument(
        "--admin-key",
        metavar="KEY",
        help=f"{about}; other users of this machine see it here, and not in the environment: "
        f"{ADMIN_KEY}",
    )


def admin_key(arguments: argparse.Namespace) -> str | None:
    """Returns the admin key from `arguments` or the environment."""
    given: str | None = arguments.admin_key
    return os.environ.get(ADMIN_KEY) if given is None else given


def http_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of `HttpSettings` from `arguments` and the environment."""
    key = os.environ.get(API_KEY) if arguments.api_key is None else arguments.api_key
    return {
        **picked(arguments, "host", "port", "client_timeout_s", "shutdown_timeout_s"),
        "access_log": arguments.access_log,
        "api_key": key,
        "max_body_bytes": parse_size(arguments.max_body, field="--max-body"),
    }


def missing_extra(command: str, error: ModuleNotFoundError) -> Exception:
    """Returns the error to raise: `error`, or `MissingExtra` for a package of extra ``serve``."""
    if (error.name or "").partition(".")[0] not in _EXTRA:
        return error
    return MissingExtra(f"kvconnect {command}", "serve")


def tell_url(name: str, listener: Listener) -> None:
    """Prints the URL of `name`."""
    print(f"kvconnect: {name} on {listener.url}/v1", flush=True)
