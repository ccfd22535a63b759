"""Transports of both kinds and peers in processes of their own."""

from __future__ import annotations

import pytest
from peer_process import PeerProcess, make_transport


@pytest.fixture(params=["tcp", "nixl"])
def kind(request):
    """The transport under test."""
    return request.param


@pytest.fixture
def transport_of():
    """Opens transports, and closes them at the end."""
    opened = []

    def open_transport(kind, **settings):
        transport = make_transport(kind, **settings)
        opened.append(transport)
        transport.open()
        return transport

    yield open_transport
    for transport in opened:
        transport.close()


@pytest.fixture
def peer_of():
    """Starts peers, and kills them at the end."""
    started = []

    def start(kind, **settings):
        peer = PeerProcess(kind, **settings)
        started.append(peer)
        return peer

    yield start
    for peer in started:
        peer.end()
