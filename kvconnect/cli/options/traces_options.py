"""The option of commands that make traces."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvconnect.cli.command import Options
from kvconnect.errors import MissingExtra

if TYPE_CHECKING:
    from kvconnect.otel import TraceExport

__all__ = ["add_traces_option", "traces_of"]


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
