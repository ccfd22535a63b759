"""For every check of the network there is a backend, or a server, that it finds wrong."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvconnect.backends.guard.breaker import Breaker
from kvconnect.testing import Address, Subject
from kvconnect.testing.checks import all_checks, faults
from kvconnect.testing.runner import run_check

PATH = Path(__file__).with_name("toy_server.py")
SPEC = importlib.util.spec_from_file_location("toy_server", PATH)
toy = sys.modules.setdefault("toy_server", importlib.util.module_from_spec(SPEC))
SPEC.loader.exec_module(toy)

CHECKS = {one.name: one for one in all_checks() if one.group == "network"}
FAULTS = (
    *("refused", "black_hole", "half_open", "frozen", "one_byte_per_second", "slow_answers"),
    *("garbage_answers", "wrong_length"),
)
WRONG = {
    **dict.fromkeys(FAULTS, toy.StaysBroken),
    "reset_anywhere": toy.TakesPartOfAnAnswer,
    "unreachable_at_start": toy.ConnectsLater,
    "close_while_frozen": toy.ClosesSlowly,
    "breaker": toy.ToyBackend,
    "restart_with_data": toy.ToyBackend,
    "restart_empty": toy.ToyBackend,
}


class ToySubject(Subject):
    def __init__(self, server, backend):
        self.server = server
        self.backend = backend
        self.address = Address("127.0.0.1", server.port)
        self.patience_s = 0.3
        self.deadline_s = 0.2

    def make_backend(self):
        return self.make_via(self.address)

    def make_via(self, address):
        return self.backend(address.host, address.port)

    async def restart_server(self, *, empty):
        self.server.restart(empty=not empty)


def test_there_is_a_wrong_backend_for_every_check_of_the_network():
    assert set(WRONG) == set(CHECKS)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_backend_is_found(name, monkeypatch):
    monkeypatch.setattr(faults, "_BUSY_S", 0.5)  # what is too late need not be so by seconds
    if name == "breaker":
        monkeypatch.setattr(Breaker, "failed", lambda *_: None)
    server = toy.ToyServer()
    server.close = server.stop
    with closing(server):
        outcome = run_check(CHECKS[name], ToySubject(server, WRONG[name]))
    assert outcome.result == "failed", outcome
    print(outcome.reason)
