"""A small store on a network keeps the contract, also while the network fails."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from kvconnect.testing import Address, BackendConformance

PATH = Path(__file__).with_name("toy_server.py")
SPEC = importlib.util.spec_from_file_location("toy_server", PATH)
toy_server = sys.modules.setdefault("toy_server", importlib.util.module_from_spec(SPEC))
SPEC.loader.exec_module(toy_server)


class TestToyServer(BackendConformance):
    @pytest.fixture(autouse=True)
    def server(self):
        self._server = toy_server.ToyServer()
        self.address = Address("127.0.0.1", self._server.port)
        yield
        self._server.stop()

    def make_backend(self):
        return self.make_via(self.address)

    def make_via(self, address):
        return toy_server.ToyBackend(address.host, address.port)

    async def restart_server(self, *, empty):
        self._server.restart(empty=empty)
