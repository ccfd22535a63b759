"""A network link of a known rate between two processes of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvconnect.errors import KvConnectError

DEVICE = "veth0"
"""The network device of both sides."""

_BURST_NBYTES = 4_000_000  # what a link that was idle carries before its rate holds
_ADDRESSES = ("10.214.73.1", "10.214.73.2")


class LinkRefused(KvConnectError):
    """The refusal of network namespaces on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class ShapedLink:
    """A link between two network namespaces that have no other connection.

    Attributes:
        namespaces: their names.
        hosts: the address of each.
    """

    namespaces: tuple[str, str]
    hosts: tuple[str, str] = _ADDRESSES

    def command(self, side: int) -> tuple[str, ...]:
        """Returns the words before a command that is to run on that side, 0 or 1."""
        return ("ip", "netns", "exec", self.namespaces[side])


@contextmanager
def shaped_link(gbit: float) -> Iterator[ShapedLink]:
    """Makes a link of `gbit` Gbit/s each way, and removes it at the end.

    All processes on the link must have ended by then.

    Raises:
        LinkRefused: not root, no ``ip`` or ``tc`` here, or the kernel refuses.
    """
    if os.geteuid() != 0:
        raise LinkRefused("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LinkRefused(f"network namespaces need the command {tool}")
    link = ShapedLink((f"kvbench-{os.getpid()}-p", f"kvbench-{os.getpid()}-d"))
    first, second = link.namespaces
    try:
        _run(f"ip netns add {first}")
        _run(f"ip netns add {second}")
        _run(f"ip link add {DEVICE} netns {first} type veth peer name {DEVICE} netns {second}")
        for name, host in zip(link.namespaces, link.hosts, strict=True):
            _run(f"ip -n {name} addr add {host}/30 dev {DEVICE}")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip -n {name} link set {DEVICE} up")
            rate = f"{round(gbit * 1e6)}kbit burst {_BURST_NBYTES} latency 50ms"
            _run(f"tc -n {name} qdisc add dev {DEVICE} root tbf rate {rate}")
        yield link
    finally:
        for name in link.namespaces:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(command: str) -> None:
    done = subprocess.run(command.split(), check=False, capture_output=True, text=True)
    if done.returncode:
        raise LinkRefused(f"{command}: {done.stderr.strip()}")
