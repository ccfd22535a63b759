"""What a server's process runs. A module of its own, since it is imported by name."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

ROUTER_SECRET = "the-routers-and-its-servers"


def serve(output: Path, arguments: list[str]) -> None:
    """``kvconnect serve`` with `arguments`, as the command line runs it; prints to `output`."""
    _run("serve", output, arguments)


def serve_with_router_secret(output: Path, arguments: list[str]) -> None:
    """The same with `ROUTER_SECRET` in the environment."""
    os.environ["KVCONNECT_ROUTER_SECRET"] = ROUTER_SECRET
    serve(output, arguments)


def serve_with_spans(output: Path, arguments: list[str]) -> None:
    """The same; its spans are written beside `output` at the end, and sent nowhere."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from kvconnect import otel

    memory = InMemorySpanExporter()
    otel.OTLPSpanExporter = lambda endpoint: memory
    try:
        serve(output, arguments)
    finally:
        spans = ",".join(span.to_json() for span in memory.get_finished_spans())
        output.with_suffix(".spans").write_text(f"[{spans}]")


def route(output: Path, arguments: list[str]) -> None:
    """``kvconnect route`` with `arguments`, as the command line runs it; prints to `output`."""
    _run("route", output, arguments)


def route_with_few_descriptors(output: Path, arguments: list[str]) -> None:
    """The same where a process may have 600 files open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))
    route(output, arguments)


def _run(command: str, output: Path, arguments: list[str]) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # As in a process that a shell starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from kvconnect.cli.main import main

    sys.exit(main([command, *arguments]))


def serve_until_it_fails(output: Path, arguments: list[str]) -> None:
    """The same with an engine that fails on a prompt of 77 tokens."""
    from kvconnect.engine.engine import Engine

    forward = Engine._forward

    def failing(engine, plan):
        if any(one.is_prompt and one.end == 77 for one in plan):
            raise RuntimeError("a secret of this machine")
        return forward(engine, plan)

    Engine._forward = failing
    serve(output, arguments)
