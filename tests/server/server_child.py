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


def page(output: Path, arguments: list[str]) -> None:
    """``kvconnect page`` with `arguments`, as the command line runs it; prints to `output`."""
    _run("page", output, arguments)


def page_of_a_million_blocks(output: Path, arguments: list[str]) -> None:
    """The same of a store that lists 22,222 prompts of 20 tenants, and a million blocks."""
    import numpy as np

    from kvconnect.backend import StoredEntry
    from kvconnect.backends.disk.store import DiskBackend
    from kvconnect.keys import Namespace

    namespaces = [Namespace(f"salt {number}").tag() for number in range(20)]
    tokens = np.arange(65, 81, dtype=np.int32)

    def entry(key: bytes) -> StoredEntry:
        prompt, block = int.from_bytes(key[:4]), int.from_bytes(key[4:8])
        before = block - 1
        # The first five blocks of a prompt are those of every prompt of its tenant.
        owner = prompt % 20 if block == 5 else prompt
        parent = None if block == 0 else key_of(owner, before)
        return StoredEntry(key, 1000, 35, 1.0, 2.0, parent, tokens, namespaces[prompt % 20], b"m")

    def key_of(prompt: int, block: int) -> bytes:
        return prompt.to_bytes(4) + block.to_bytes(4) + bytes(24)

    async def scan(self):
        for prompt in range(22_222):
            for block in range(0 if prompt < 20 else 5, 50):
                yield entry(key_of(prompt, block))

    async def describe(self, keys):
        return [entry(key) for key in keys]

    DiskBackend.scan, DiskBackend.describe = scan, describe
    page(output, arguments)


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

    def failing(engine, plan, *more):
        if any(one.is_prompt and one.end == 77 for one in plan):
            raise RuntimeError("a secret of this machine")
        return forward(engine, plan, *more)

    Engine._forward = failing
    serve(output, arguments)
