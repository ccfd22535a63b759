"""``kvconnect bench transfer``: what it refuses, measures and leaves out."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import pytest

from kvconnect.transfer.tcp import peer, source, stream
from kvconnect_bench.transfer import link, pulls, run
from kvconnect_bench.transfer.handover import Handover, figures_of
from kvconnect_bench.transfer.link import LinkRefused, shaped_link
from kvconnect_bench.transfer.pull_party import PullParty
from kvconnect_bench.transfer.pulls import PullPair

_CLONE_NEWNET = 0x40000000
SMALL = ("--total", "1MiB", "--piece", "4KiB", "--rounds", 1)


class PartyHere:
    """Stands in for a process: the same methods, on a thread of this one.

    With ``ip netns exec NAME`` before its command that thread is in the network namespace NAME.
    """

    pid = os.getpid()

    def __init__(self, *_: object, before: Sequence[str] = ()) -> None:
        self._party = PullParty()
        self._thread = ThreadPoolExecutor(1, initializer=_enter, initargs=(before,))

    def ask(self, workload: str, **arguments: object) -> object:
        asked = json.loads(json.dumps(arguments))
        answer = self._thread.submit(getattr(self._party, workload), **asked).result()
        return json.loads(json.dumps(answer))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for transport in self._party._transports.values():
            transport.close()
        for connection in self._party._plain.values():
            connection.close()
        for listener in self._party._listeners:
            listener.close()
        self._thread.shutdown()


def _enter(before: Sequence[str]) -> None:
    if before:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", before[-1]).open("rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")


@pytest.fixture
def parties_here(monkeypatch) -> None:
    monkeypatch.setattr(pulls, "Party", PartyHere)
    for module in (peer, source):
        monkeypatch.setattr(module, "Stream", module.Stream)  # put back what a party replaces


def test_a_pull_over_the_loopback_stands_beside_a_plain_socket(bench, parties_here):
    found, _ = bench("transfer", "--parts", "loopback", "--transports", "tcp", *SMALL)
    assert list(found) == [
        "loopback: plain socket",
        "loopback: tcp",
        "loopback: tcp without checksums",
        "loopback: tcp, published before",
        "loopback: tcp / plain socket",
        "loopback: tcp / tcp without checksums",
        "loopback: tcp, published before / tcp without checksums",
    ]
    assert found["loopback: tcp / plain socket"]["target"] == ">= 0.9"
    of_bare = {name: one["target"] for name, one in found.items() if "/ tcp without" in name}
    assert list(of_bare.values()) == ["", ">= 0.85"]
    assert all(figure["value"] > 0 for figure in found.values())


def test_what_checksums_are_compared_with_has_none(parties_here, monkeypatch):
    pieces, nbytes = 4, 1 << 18
    with PullPair.started(pieces * nbytes) as pair:
        for side in (pair.source, pair.reader):
            side.ask("leave_checksums_out")
        monkeypatch.delattr(stream, "_checksum")
        pair.open("tcp")
        pair.check(lambda: pair.pull("tcp", pieces, nbytes), pieces, nbytes)


def test_a_pull_over_a_link_of_a_known_rate_is_authenticated(bench, parties_here):
    try:
        with shaped_link(1):
            pass
    except LinkRefused as refused:
        pytest.skip(f"{refused}: NOT TESTED")
    found, _ = bench("transfer", "--parts", "link", "--transports", "tcp", *SMALL, "--rates", 1)
    assert found["link of 1 Gbit/s: tcp / line rate"]["target"] == ">= 0.95"
    assert all(figure["value"] > 0 for figure in found.values())
    assert "kvbench-" not in _namespaces()


def test_a_transport_that_delivers_other_bytes_is_no_result(kvconnect, parties_here, monkeypatch):
    monkeypatch.setattr(PullParty, "pull", lambda *_, **__: 0.001)
    with pytest.raises(RuntimeError, match="other bytes than those asked for"):
        kvconnect("bench", "transfer", "--parts", "loopback", "--transports", "tcp", *SMALL)


def test_a_kernel_that_lets_no_process_be_read_is_said(kvconnect, parties_here, monkeypatch):
    monkeypatch.setattr(run, "find_spec", lambda _: True)
    monkeypatch.setattr(PartyHere, "pid", 2**22 + 1)  # beyond all that there are
    code, out, err = kvconnect("bench", "transfer", "--parts", "host", *SMALL)
    assert (code, out) == (2, "")
    assert "left out: process_vm_readv: No such process" in err


def test_what_this_machine_lacks_is_left_out_and_said(kvconnect, monkeypatch):
    monkeypatch.setattr(run, "find_spec", lambda _: None)
    monkeypatch.setattr(link.os, "geteuid", lambda: 1000)
    code, out, err = kvconnect("bench", "transfer", "--parts", "host,link", *SMALL)
    assert (code, out) == (2, "")
    assert "nixl is not installed: left out" in err
    assert "links are left out: network namespaces need root" in err
    assert "nothing of what was asked for can be measured" in err


def test_each_target_stands_beside_its_figure():
    found = Handover(
        exposed=(0.001, 0.003, 0.002),
        first=(0.02,),
        step=(0.01,),
        two_layers=(0.0005,),
        idle_prefill=0.004,
        idle_decode=0.025,
    )
    shown = {one.name: one for one in figures_of("tcp", found)}
    exposed = shown["handover, tcp: exposed transfer"]
    assert (exposed.value, exposed.target) == (2.0, "<= 2.500")
    first = shown["handover, tcp: first token after the last chunk"]
    assert (first.value, first.target) == (20.0, "<= 17.000")
    assert shown["handover, tcp: idle decode"].value == 2.5


def test_a_link_that_cannot_be_made_leaves_no_namespace(monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root: NOT TESTED")
    before = _namespaces()
    monkeypatch.setattr(link, "DEVICE", "a-name-too-long-for-a-device")
    with pytest.raises(LinkRefused, match=r"^ip link add"), shaped_link(1):
        pass
    assert _namespaces() == before


def _namespaces() -> str:
    listed = subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True)
    return listed.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)  # a dozen processes, each of which imports torch
def test_all_of_it_on_this_machine(bench, model: Path):
    found, _ = bench(
        *("transfer", *SMALL, "--model", model, "--prompt-tokens", 64, "--requests", 2),
        *("--rates", 1, "--idle", "200ms"),
    )
    for name in ("loopback: tcp / plain socket", "handover, tcp: exposed transfer"):
        assert found[name]["value"] > 0
    if os.geteuid() == 0:
        assert found["link of 1 Gbit/s: tcp / line rate"]["value"] > 0
        assert "kvbench-" not in _namespaces()
