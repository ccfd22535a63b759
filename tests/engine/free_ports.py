"""Ports for the ranks of one engine, which listen one after the other."""

from __future__ import annotations

import random
import socket


def free_ports(count: int) -> int:
    """The first of so many ports that follow each other and were free just now."""
    for _ in range(50):
        with socket.socket() as first:
            port = random.randrange(20_000, 32_000)  # the system hands out others by itself
            held = []
            try:
                first.bind(("127.0.0.1", port))
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
