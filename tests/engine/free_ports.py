"""Ports for the ranks of one engine, which listen one after the other."""

from __future__ import annotations

import socket


def free_ports(count: int) -> int:
    """The first of so many ports that follow each other and were free just now."""
    for _ in range(50):
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            held = []
            try:
                for number in range(1, count):
                    held.append(socket.socket())
                    held[-1].bind(("127.0.0.1", port + number))
            except (OSError, OverflowError):
                continue
            else:
                return port
            finally:
                for one in held:
                    one.close()
    raise AssertionError("no ports are free")
