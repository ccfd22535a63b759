"""The options of commands that answer over HTTP."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvconnect.backends.url import parse_size
from kvconnect.cli.command import Options, add_duration, add_number, picked
from kvconnect.errors import MissingExtra

if TYPE_CHECKING:
    from kvconnect.otel import TraceExport
    from kvconnect.server.http.listener import Listener

ROUTER_SECRET = "KVCONNECT_ROUTER_SECRET"  # noqa: S105  its name
ADMIN_KEY = "KVCONNECT_ADMIN_KEY"
METRICS_KEY = "KVCONNECT_METRICS_KEY"
_ENVIRONMENT = {"api": "KVCONNECT_API_KEY", "admin": ADMIN_KEY, "metrics": METRICS_KEY}


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
    add_key(group, "api", "what clients must send")
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


def add_key(group: Options, name: str, about: str) -> None:
    """Adds the option of the key `name`, which `key_of` reads."""
    group.add_argument(
        f"--{name}-key",
        metavar="KEY",
        help=f"{about}; other users of this machine see it here, and not in the environment: "
        f"{_ENVIRONMENT[name]}",
    )


def key_of(arguments: argparse.Namespace, name: str) -> str | None:
    """Returns the key `name` from `arguments`, or else from the environment."""
    given: str | None = getattr(arguments, f"{name}_key")
    return os.environ.get(_ENVIRONMENT[name]) if given is None else given


def http_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of `HttpSettings` from `arguments` and the environment."""
    return {
        **picked(arguments, "host", "port", "client_timeout_s", "shutdown_timeout_s"),
        "access_log": arguments.access_log,
        "api_key": key_of(arguments, "api"),
        "max_body_bytes": parse_size(arguments.max_body, field="--max-body"),
    }


def tell_url(name: str, listener: Listener) -> None:
    """Prints the URL of `name`."""
    print(f"kvconnect: {name} on {listener.url}/v1", flush=True)


def add_traces_option(group: Options) -> None:
    """Adds ``--traces``."""
    group.add_argument(
        "--traces",
        metavar="URL",
        help="send OpenTelemetry spans of requests to this collector over OTLP/HTTP, as "
        "http://127.0.0.1:4318; env: where the variables OTEL_* say (default: none are made)",
    )


@contextmanager
def traces_of(
    arguments: argparse.Namespace, *, model: str | None = None
) -> Iterator[TraceExport | None]:
    """Makes traces while the context is open; yields ``None`` if none are wanted.

    Leaving it sends what is left, and blocks up to 3 s for that.

    Raises:
        ConfigurationError: the URL is wrong.
        MissingExtra: the packages of the extra ``otel`` are not installed.
    """
    if arguments.traces is None:
        yield None
        return
    try:
        from kvconnect.otel import TraceExport, trace_requests
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise MissingExtra("--traces", "otel") from error
    export = TraceExport(arguments.traces)
    stop = trace_requests(export.provider, model=model)
    try:
        yield export
    finally:
        stop()
        export.close()
