"""Two hosts on this machine: network namespaces joined by a link that can be cut."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x20000
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
_PR_SET_PDEATHSIG = 1
_OURS = Path("/proc/self/ns/net")


def why_not() -> str:
    """Why there can be no networks here; empty: there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return tried.stderr.decode().strip()


def end_with_parent() -> None:
    """The calling process is killed when the one that started it ends, stopped or not."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)


def _call(function: str, *arguments: int | bytes | None) -> None:
    if ctypes.CDLL(None, use_errno=True)[function](*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{function}: {os.strerror(error)}")


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace: that of a process which does nothing else.

    It has no name that could be left behind: the namespace ends with the last process in it, and
    the first one ends when its input does, so with this process, however that ends.

    Attributes:
        address: of its end of the link.
        device: its end of the link.
        holder: the process.
    """

    address: str
    device: str
    holder: subprocess.Popen[bytes]

    @classmethod
    def start(cls, address: str, device: str) -> Self:
        """A host with nothing but its loopback."""
        command = ["unshare", "--net", "cat"]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        host = cls(address, device, holder)
        end = time.monotonic() + 60
        while host._namespace.readlink() == _OURS.readlink():
            assert holder.poll() is None, "unshare has ended"
            assert time.monotonic() < end, "there is no namespace"
            time.sleep(0.002)
        host.run("ip", "link", "set", "lo", "up")
        return host

    @property
    def _namespace(self) -> Path:
        return Path(f"/proc/{self.holder.pid}/ns/net")

    def run(self, *command: str) -> None:
        """Runs a command there."""
        inside = ("nsenter", f"--net={self._namespace}", *command)
        ended = subprocess.run(inside, capture_output=True, check=False)
        assert ended.returncode == 0, f"{' '.join(command)}: {ended.stderr.decode()}"

    @staticmethod
    def enter(pid: int) -> None:
        """Brings the calling process, which has one thread yet, to the host of `pid`."""
        descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _call("setns", descriptor, _CLONE_NEWNET)
        finally:
            os.close(descriptor)
        # UCX finds devices in /sys, which shows those of the namespace that mounted it.
        _call("unshare", _CLONE_NEWNS)
        _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        _call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)

    def nbytes_received(self) -> int:
        """What has come over the link so far."""
        for line in Path(f"/proc/{self.holder.pid}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == self.device:
                return int(counters.split()[0])
        raise AssertionError(f"{self.device} is not there")

    def end(self) -> None:
        """Ends it, and with it the link."""
        self.holder.kill()
        self.holder.wait(60)
        assert self.holder.stdin is not None
        self.holder.stdin.close()


class Network:
    """A host for a prefill, one for a decode, and a link of 1 Gbit/s between them."""

    def __init__(self) -> None:
        self.prefill = Host.start("10.77.0.1", "prefill0")
        self.decode = Host.start("10.77.0.2", "decode0")
        here, there = self.prefill, self.decode
        link = ("type", "veth", "peer", "name", there.device, "netns", str(there.holder.pid))
        here.run("ip", "link", "add", here.device, *link)
        for host in (here, there):
            host.run("ip", "address", "add", f"{host.address}/24", "dev", host.device)
            host.run("ip", "link", "set", host.device, "up")
            shape = ("tbf", "rate", "1gbit", "burst", "4mb", "latency", "50ms")
            host.run("tc", "qdisc", "add", "dev", host.device, "root", *shape)

    def cut(self) -> None:
        """Nothing gets through; of the decode's side no send is refused, they are lost."""
        self.prefill.run("ip", "link", "set", self.prefill.device, "down")

    def heal(self) -> None:
        """The link is there again."""
        self.prefill.run("ip", "link", "set", self.prefill.device, "up")

    def end(self) -> None:
        """Ends both hosts; idempotent."""
        for host in (self.prefill, self.decode):
            host.end()


if __name__ == "__main__":
    # For the test that kills it: says which processes hold the namespaces, and waits.
    network = Network()
    print(network.prefill.holder.pid, network.decode.holder.pid, flush=True)
    sys.stdin.read()
