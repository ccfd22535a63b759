"""A small store on a network keeps the contract, also while the network fails."""

from __future__ import annotations

import pytest
import toy_server

from kvconnect.testing import Address, BackendConformance


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
