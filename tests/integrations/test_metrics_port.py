"""Metrics of a process of another engine."""

from __future__ import annotations

import socket
import socketserver
import urllib.error
import urllib.request
from contextlib import ExitStack

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sglang_pools import StandInPool, fill, hashes, indices, storage_config

from kvconnect import trace
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.core.metrics_port import tell_metrics
from kvconnect.integrations.core.settings import MetricsSettings
from kvconnect.integrations.sglang import KvConnectStorage

LOCAL = "127.0.0.1"


@pytest.fixture(autouse=True)
def _own_name(monkeypatch):
    monkeypatch.setattr(trace.metrics, "engine", "kvconnect")
    # Servers look every half a second whether they are to end.
    monkeypatch.setattr(socketserver.BaseServer.serve_forever, "__defaults__", (0.01,))


@pytest.fixture
def ports():
    """Two ports, one after the other, that were free."""
    for first in range(20_000, 30_000, 2):
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind((LOCAL, first))
                two.bind((LOCAL, first + 1))
            except OSError:
                continue
        return first, first + 1
    raise AssertionError("no two free ports")


def engines(port):
    """The label `engine` of all that `port` tells; nothing if nothing listens."""
    try:
        with urllib.request.urlopen(f"http://{LOCAL}:{port}/metrics", timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
    except urllib.error.URLError:
        return set()
    return {sample.labels["engine"] for family in families for sample in family.samples}


def test_one_server_for_all_of_a_process_until_the_last_ends(ports):
    settings = MetricsSettings(metrics_port=ports[0])
    first = tell_metrics("vllm", settings)
    second = tell_metrics("vllm", settings)
    assert [engines(port) for port in ports] == [{"vllm"}, set()]
    first()
    assert engines(ports[0]) == {"vllm"}
    second()
    assert engines(ports[0]) == set()
    tell_metrics("vllm", settings)()  # and once more


def test_the_next_port_is_taken_if_another_process_has_the_first(ports):
    with ExitStack() as stack:
        other = stack.enter_context(socket.socket())
        other.bind((LOCAL, ports[0]))
        other.listen()
        stack.callback(tell_metrics("sglang", MetricsSettings(metrics_port=ports[0])))
        assert engines(ports[1]) == {"sglang"}


def test_no_port_tells_whose_process_it_is_and_listens_nowhere():
    tell_metrics("trtllm", MetricsSettings())()
    assert trace.metrics.engine == "trtllm"


def test_what_cannot_be_listened_to_is_refused_with_the_fields():
    settings = MetricsSettings(metrics_port=65535, metrics_address="192.0.2.1")
    with pytest.raises(ConfigurationError, match=r"metrics_port=65535.*'192\.0\.2\.1'"):
        tell_metrics("vllm", settings)
    with socket.socket() as other:
        other.bind((LOCAL, 65535))
        other.listen()
        with pytest.raises(ConfigurationError, match=r"metrics_port=65535: ports .* all taken"):
            tell_metrics("vllm", MetricsSettings(metrics_port=65535))


@pytest.mark.parametrize("port", [0, -1, 65536, "x"])
def test_a_port_is_a_number(port):
    with pytest.raises(ConfigurationError, match="metrics_port"):
        MetricsSettings(metrics_port=port)


def test_sglang_tells_pages_and_is_scraped(tiny, tmp_path, ports):
    pool = StandInPool("page_first")
    fill(pool)
    url = f"disk://{tmp_path}/kv?capacity=64MiB"
    storage = KvConnectStorage(storage_config(tiny, url, metrics_port=ports[0]), {})
    assert storage.get_stats() is None  # before it has a pool
    storage.register_mem_pool_host(pool)
    try:
        storage.batch_set_v1(hashes(2), indices([0, 1]))
        assert engines(ports[0]) == {"sglang"}
        storage.get_stats()
    finally:
        storage.close()
    assert engines(ports[0]) == set()
    assert storage.get_stats() is None
