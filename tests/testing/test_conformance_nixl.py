"""``nixl:`` keeps the contract: what one process saves, another loads, also over a bad network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from nixl_peer import Across, NixlPeer

from kvconnect.backends import open_backend
from kvconnect.testing import Address, BackendConformance

NETWORK = "&patience=300ms&timeout=500ms"
PATIENT = "&patience=60s&timeout=60s&verify=full"


class _Across(BackendConformance):
    """All blocks are those of another process, which is reached over the network."""

    __test__ = False
    ends_cancelled = True
    transport: ClassVar[str] = "tcp"
    far: ClassVar[NixlPeer]
    skip: ClassVar = {
        "network.unreachable_at_start": "a peer that is not there is connected to when it comes",
        "network.restart_with_data": "blocks live as long as their instance",
        "resources.no_descriptors": "its child has no process beside it; see TestNixlAlone",
    }

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def peer(cls, request: Any) -> Iterator[None]:
        request.cls.far = NixlPeer(f"nixl://?transport={request.cls.transport}")
        yield
        request.cls.far.end()

    @pytest.fixture(autouse=True)
    def where(self, peer: None) -> None:
        self.address = Address("127.0.0.1", self.far.port)

    def make_backend(self):
        return self._make(self.address, PATIENT)

    def make_via(self, address):
        return self._make(address, NETWORK)

    def _make(self, address, query):
        url = f"nixl://{address.host}:{address.port}?transport={self.transport}{query}"
        return Across(open_backend(url).inner, lambda: type(self).far)

    async def restart_server(self, *, empty):
        self.far.end()
        url = f"nixl://?transport={self.transport}&listen={self.far.address}"
        type(self).far = NixlPeer(url)


@pytest.mark.slow
class TestNixlAlone(BackendConformance):
    """What it does with the blocks that it saved itself."""

    skip: ClassVar = {
        "faults": "of one memory: see TestMemory",
        "keys": "of one memory: see TestMemory",
        "time": "of one memory: see TestMemory",
        "model": "of one memory: see TestMemory",
        "integrity": "of one memory: see TestMemory",
        "end to end": "of one memory: see TestMemory",
    }

    def make_backend(self):
        return open_backend("nixl://?transport=tcp").inner

    def make_small(self, capacity):
        return open_backend(f"nixl://?transport=tcp&capacity={capacity}").inner


@pytest.mark.slow
class TestNixlWhole(_Across):
    __test__ = True


@pytest.mark.slow
class TestNixlByNixl(_Across):
    __test__ = True
    transport = "nixl"
    deadline_s = 3.0  # its first agent takes a second
