"""Prefill and decode servers in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from server_process import ServerProcess, running

__all__ = ["Servers", "prefix", "started"]


@dataclass
class Servers:
    """Those behind a router."""

    prefill: list[ServerProcess]
    decode: list[ServerProcess]

    def urls(self) -> tuple[str, ...]:
        """As the router takes them."""
        return (
            *("--prefill", *(one.url for one in self.prefill)),
            *("--decode", *(one.url for one in self.decode)),
        )

    def idle(self) -> bool:
        """Whether nothing runs, and no block is held for it."""
        return all(
            one.live() == 0 and one.figure("kvconnect_device_blocks", state="used") == 0
            for one in (*self.prefill, *self.decode)
        )


@contextmanager
def started(
    model: Path, directory: Path, prefill: int, decode: int, *more: str
) -> Iterator[Servers]:
    """Servers that start at the same time, with `more` options."""
    roles = ["prefill"] * prefill + ["decode"] * decode

    def start(number: int) -> ServerProcess:
        output = directory / f"{roles[number]}{number}"
        options = ("--kv-cache-tokens", "65536", "--max-batch-size", "32")
        return stack.enter_context(running(model, output, "--role", roles[number], *options, *more))

    with ExitStack() as stack, ThreadPoolExecutor(len(roles)) as pool:
        servers = list(pool.map(start, range(len(roles))))
        yield Servers(servers[:prefill], servers[prefill:])


def prefix(number: int) -> str:
    """512 characters that no other number has."""
    return f"{number:04}" * 128
