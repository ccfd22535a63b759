"""Addresses: their parts, and which of them only this machine reaches."""

from __future__ import annotations

import pytest

from kvconnect.address import host_and_port, is_loopback


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)),
        *(("::ffff:127.0.0.1", True), ("0.0.0.0", False), ("::", False), ("", False)),
        *(("10.0.0.1", False), ("localhost.example.com", False), ("::ffff:10.0.0.1", False)),
        *(("::1%lo", True), ("fe80::1%lo", False), ("127.0.0.1%x.example.com", False)),
    ],
)
def test_what_is_loopback(host, is_one):
    assert is_loopback(host) == is_one


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:7600", ("127.0.0.1", 7600)),
        ("host:0", ("host", 0)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_an_address_has_two_parts(address, parts):
    assert host_and_port(address) == parts


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:65536", "host:-1", "host:²"])
def test_what_is_no_address_is_refused_with_an_example(address):
    with pytest.raises(ValueError, match=r"must be 'host:port', as '127\.0\.0\.1:7600'"):
        host_and_port(address)
