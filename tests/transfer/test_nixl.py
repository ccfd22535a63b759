"""`NixlTransport`: what it says when NIXL is missing, and how an agent is used."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from own_process import own_process
from peer_process import PeerProcess, make_transport, pattern
from waiting import until

from kvconnect.errors import ConfigurationError, MissingExtra
from kvconnect.transfer.nixl import NixlTransport, agent_thread, library
from kvconnect.transfer.nixl import transfers as cutting
from kvconnect.transfer.nixl import transport as nixl_transport
from kvconnect.transfer.nixl.agent import Agent, AgentError
from kvconnect.transfer.nixl.nixl_pull import NixlPull, PullPart
from kvconnect.transfer.nixl.transfers import Base, transfers
from kvconnect.transfer.reads import Reads, runs
from kvconnect.transfer.transport import PeerUnreachable, PullFailed


@own_process
def test_nixl_that_is_not_installed_is_named_when_it_is_opened():
    def missing(name):
        raise ModuleNotFoundError(name="nixl")

    sys.modules.pop("nixl._bindings", None)
    sys.modules["nixl"] = None
    library.importlib = SimpleNamespace(import_module=missing)
    transport = NixlTransport()
    with pytest.raises(MissingExtra, match=r"pip install '\.\[nixl\]'"):
        transport.open()
    transport.close()
    assert threading.active_count() == 1


@own_process
def test_nothing_listens_beyond_loopback_unless_told_to():
    with closing(NixlTransport()) as transport, closing(NixlTransport(tls="tcp")) as other:
        transport.open()
        other.open()
        found = psutil.Process().net_connections("inet")
        listening = {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


@pytest.mark.parametrize(
    "error",
    [
        ImportError("detected CUDA 12 but nixl-cu12 is not installed"),
        OSError("libucp.so: cannot open shared object file"),
        ModuleNotFoundError("No module named 'nixl_cu12'", name="nixl_cu12"),
    ],
)
def test_nixl_that_cannot_be_imported_says_why(monkeypatch, error):
    def unusable(name):
        raise error

    monkeypatch.setattr(library.importlib, "import_module", unusable)
    with pytest.raises(ConfigurationError, match=f"not usable: .*{str(error)[:20]}") as found:
        NixlTransport().open()
    assert not isinstance(found.value, MissingExtra)


@pytest.mark.parametrize("wrong", [{"tls": "nosuchtransport"}, {"device": "nosuchdevice"}])
def test_a_backend_that_cannot_be_made_is_a_configuration_error(wrong):
    transport = NixlTransport(**wrong)
    with pytest.raises(ConfigurationError, match="UCX"):
        transport.open()
    transport.close()


def test_a_wrong_tls_is_named():
    with pytest.raises(ConfigurationError, match="tls='tcp,cma'"):
        NixlTransport(tls="tcp,cma")
    with pytest.raises(ConfigurationError, match="device='lo,eth1'"):
        NixlTransport(device="lo,eth1")
    with pytest.raises(ConfigurationError, match="connect_timeout_s=0"):
        NixlTransport(connect_timeout_s=0)


def test_rdma_cards_make_errors_not_quiescent(monkeypatch, tmp_path):
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setattr(library, "_RDMA_DEVICES", tmp_path)
    assert NixlTransport(device="all").quiescent_after_error
    (tmp_path / "mlx5_0").mkdir()
    assert NixlTransport().quiescent_after_error
    assert not NixlTransport(device="all").quiescent_after_error
    assert NixlTransport(device="all", tls="tcp").quiescent_after_error
    monkeypatch.setenv("UCX_TLS", "tcp,cma,self")
    assert NixlTransport(device="all").quiescent_after_error


def opened_pair():
    source, reader = (NixlTransport(identity=name) for name in ("source", "reader"))
    for transport in (source, reader):
        transport.open()
    source.register(torch.from_numpy(pattern(1, 4096)))
    memory = torch.zeros(4096, dtype=torch.uint8)
    yield source, reader, memory, reader.register(memory)
    for transport in (source, reader):
        transport.close()


# The tests that close or change one of the two have a pair of their own.
pair = pytest.fixture(scope="module", name="pair")(opened_pair)
own_pair = pytest.fixture(name="own_pair")(opened_pair)


def test_what_a_peer_registers_later_is_read_after_connecting_again(own_pair):
    source, reader, memory, into = own_pair
    first = reader.connect(source.local())
    source.register(torch.from_numpy(pattern(2, 4096)))
    again = reader.connect(source.local())
    assert again.regions == (4096, 4096)
    reader.pull(again, Reads(1, [0], into, [0], 4096), deadline_s=60).done.result()
    assert np.array_equal(memory, pattern(2, 4096))
    failed = reader.pull(first, Reads(0, [0], into, [0], 1), deadline_s=60)
    with pytest.raises(PullFailed, match="disconnected"):
        failed.done.result(60)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_peer_that_is_disconnected_while_it_connects_anew_stays_known(pair, monkeypatch, when):
    """Two links to one engine share its agent: the one comes while the other goes."""
    source, reader, memory, into = pair
    first = reader.connect(source.local())
    reach = reader._reach

    def reach_beside(thread, place):
        if when == "before":
            reader.disconnect(first)
        reach(thread, place)
        if when == "after":
            reader.disconnect(first)

    monkeypatch.setattr(reader, "_reach", reach_beside)
    again = reader.connect(source.local())
    reader._thread.call(lambda: None)
    reader.pull(again, Reads(0, [0], into, [0], 4096), deadline_s=60).done.result()
    assert np.array_equal(memory, pattern(1, 4096))
    reader.disconnect(again)
    assert reader._thread.call(lambda: None) is None
    failed = reader.pull(again, Reads(0, [0], into, [0], 1), deadline_s=60)
    with pytest.raises(PullFailed, match="disconnected"):
        failed.done.result(60)


def descriptors(pid):
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.fixture
def reading(transport_of, peer_of):
    """A peer in another process, over TCP, and what reads from it."""
    peer, reader = peer_of("nixl-tcp"), transport_of("nixl-tcp")
    into = reader.register(torch.zeros(4096, dtype=torch.uint8))

    def read(handle):
        reader.pull(handle, Reads(0, [0], into, [0], 4096), deadline_s=60).done.result(60)

    return peer, reader, read


@own_process
def test_connections_made_anew_to_an_agent_leave_nothing_open_on_either_side():
    """UCX never closes one to an agent that lives."""
    peer, reader, counts = PeerProcess("nixl-tcp"), make_transport("nixl-tcp"), []
    reader.open()
    into = reader.register(torch.zeros(4096, dtype=torch.uint8))
    for _ in range(4):
        handle = reader.connect(peer.local)
        reader.pull(handle, Reads(0, [0], into, [0], 4096), deadline_s=60).done.result()
        counts.append((descriptors(os.getpid()), descriptors(peer.process.pid)))
        reader.disconnect(handle)
    reader.close()
    peer.end()
    assert counts[1:] == counts[:1] * 3


def cut(pid):
    """Ends the connections of this process to those that the process `pid` listens at."""
    found = psutil.Process(pid).net_connections("tcp")
    ports = {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}
    mine = [
        one.fd
        for one in psutil.Process().net_connections("tcp")
        if one.raddr and {one.raddr.port, one.laddr.port} & ports
    ]
    assert mine
    for fd in mine:
        with socket.socket(fileno=os.dup(fd)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("used", [True, False])
def test_a_connection_that_was_cut_is_made_anew(reading, used):
    """Whether it was in use then, or kept for the next time."""
    peer, reader, read = reading
    handle = reader.connect(peer.local)
    read(handle)
    if not used:
        reader.disconnect(handle)
    cut(peer.process.pid)
    thread = reader._thread
    name = handle.place.agent
    until(lambda: not thread.call(lambda: thread.agent.reaches(name)))
    if used:
        with pytest.raises(PullFailed):
            read(handle)
    else:
        handle = reader.connect(peer.local)
    read(handle)


def test_agents_that_have_ended_are_forgotten(reading, peer_of):
    peer, reader, _ = reading
    handle = reader.connect(peer.local)
    reader.disconnect(handle)
    peer.end()
    thread, name = reader._thread, handle.place.agent
    until(lambda: not thread.call(lambda: thread.agent.reaches(name)))
    reader.connect(peer_of("nixl-tcp").local)
    assert name not in thread._known
    assert not thread._unused


def test_what_peers_ask_to_see_that_it_is_there_is_not_kept(transport_of, monkeypatch):
    monkeypatch.setattr(agent_thread, "_DROP_NOTIFICATIONS_S", 0.05)
    dropped, drop = [], Agent.drop_notifications
    monkeypatch.setattr(Agent, "drop_notifications", lambda self: dropped.append(drop(self)))
    source, reader = transport_of("nixl"), transport_of("nixl")
    for _ in range(3):
        reader.disconnect(reader.connect(source.local()))
    until(lambda: sum(dropped) == 2)


def test_metadata_of_another_agent_are_refused(pair, transport_of):
    source, reader, *_ = pair
    local = source.local().replace(b'"source"', b'"someone"')
    with pytest.raises(PeerUnreachable, match="of the agent source/"):
        reader.connect(local)
    with pytest.raises(PeerUnreachable):
        reader.connect(b'{"transport": "tcp"}')
    reader.connect(source.local())


@pytest.mark.parametrize(
    ("field", "value"), [("addresses", 1 << 63), ("addresses", -1), ("devices", 1 << 64)]
)
def test_a_place_that_no_memory_has_is_refused(pair, field, value):
    source, reader, *_ = pair
    local = json.loads(source.local()) | {field: [value]}
    with pytest.raises(PeerUnreachable, match=field):
        reader.connect(json.dumps(local).encode())


@pytest.mark.parametrize("where", [(NixlPull, "add"), (Agent, "read"), (PullPart, "advance")])
def test_whatever_is_raised_for_a_pull_the_thread_goes_on(pair, monkeypatch, where):
    """Also what no call of NIXL is known to raise: the others are read, and it can be closed."""
    source, reader, memory, into = pair
    handle, method = reader.connect(source.local()), getattr(*where)
    raised = iter([True])

    def planted(*args, **more):
        if next(raised, False):
            raise MemoryError("planted")
        return method(*args, **more)

    monkeypatch.setattr(*where, planted)
    failed = reader.pull(handle, Reads(0, [0], into, [0], 64), deadline_s=60)
    with pytest.raises(PullFailed, match="planted"):
        failed.done.result(60)
    assert failed.terminal.wait(60)
    sound = reader.pull(handle, Reads(0, [0], into, [0], 4096), deadline_s=60)
    sound.done.result(60)
    assert np.array_equal(memory, pattern(1, 4096))


def test_after_an_error_that_is_not_quiescent_only_a_rebuild_is_terminal(own_pair):
    """As with RDMA; an agent that was destroyed stands for the error."""
    source, reader, _, into = own_pair
    reader._thread._quiescent = False
    handle = reader.connect(source.local())
    source.close()
    pull = reader.pull(handle, Reads(0, [0], into, [0], 4096), deadline_s=60)
    with pytest.raises(PullFailed) as failed:
        pull.done.result(60)
    assert failed.value.reason == "peer"
    assert not pull.terminal.is_set()
    reader.rebuild()
    assert pull.terminal.is_set()


def test_a_wait_that_is_over_before_it_begins_ends():
    """As one of microseconds is where cores are few: nothing is polled until it has ended."""
    waiting = agent_thread.AgentThread(quiescent=True)
    ended = threading.Event()

    def wait():
        for _ in range(20_000):
            waiting._commands.put(None)
            waiting._take(1e-9)
            waiting._take(1e-9)
        ended.set()

    waiting.close()
    threading.Thread(target=wait, daemon=True).start()
    assert ended.wait(60)


def test_calls_after_close_come_back(own_pair):
    source, reader, *_ = own_pair
    handle, thread = reader.connect(source.local()), reader._thread
    reader.close()
    pull = NixlPull(1)
    thread.submit(pull, "source", lambda agent: None)
    with pytest.raises(PullFailed, match="closed"):
        pull.done.result(60)
    with pytest.raises(PullFailed, match="closed"):
        thread.call(lambda: thread.agent)
    assert not handle.connected


def test_transfers_are_of_bounded_size_and_cover_everything(monkeypatch):
    monkeypatch.setattr(cutting, "_TRANSFER_NBYTES", 1000)
    whole = runs(np.array([0, 5000, 5600, 20_000]), 600)
    large = runs(np.arange(0, 7000, 700) + 50_000, 700)
    near, far = Base(1 << 40, 0, host=True), Base(1 << 50, 3, host=False)

    def covered(parts):
        return np.concatenate([np.arange(o, o + n) for o, n, _ in parts.tolist()])

    for some in (whole, large, np.concatenate([whole, large]), whole[:1]):
        found = list(transfers(some, near, some, far))
        flat = np.concatenate([np.arange(o, o + n) for o, n in some.tolist()])
        for side, base in (("local", near), ("remote", far)):
            rows = [getattr(one, side) for one in found]
            assert np.array_equal(covered(np.concatenate(rows)), flat + base.address)
            assert all(len(one) and int(one[:, 1].sum()) <= 2000 for one in rows)
            assert all(one[:, 1].max() <= 1000 for one in rows)
            assert {int(device) for one in rows for device in one[:, 2]} == {base.device}
        assert {(one.local_host, one.remote_host) for one in found} == {(True, False)}
    assert not list(transfers(whole[:0], near, whole[:0], far))


class TwoAgents:
    """A reader whose two agents read one pull side by side, 1,024 bytes at a time."""

    def __init__(self, transport_of, monkeypatch):
        monkeypatch.setattr(cutting, "_TRANSFER_NBYTES", 1024)
        monkeypatch.setattr(nixl_transport, "_cores", lambda: 2)
        source = transport_of("nixl", identity="source")
        self.reader = transport_of("nixl", identity="reader")
        self.had = pattern(1, 1 << 16)
        source.register(torch.from_numpy(self.had))
        self.memory = torch.zeros(1 << 16, dtype=torch.uint8)
        self.into = self.reader.register(self.memory)
        self.peer = self.reader.connect(source.local())
        self.second = self.reader._second

    def pull(self):
        reads = Reads(0, [0], self.into, [0], 1 << 16)
        return self.reader.pull(self.peer, reads, deadline_s=60)

    def is_second(self, agent):
        return agent is self.second._agent


@pytest.fixture
def two_agents(transport_of, monkeypatch):
    return TwoAgents(transport_of, monkeypatch)


def test_two_agents_read_one_pull_side_by_side(two_agents, monkeypatch):
    begun, begin = {True: threading.Event(), False: threading.Event()}, Agent.begin

    def both(agent, transfer):
        second = two_agents.is_second(agent)
        begun[second].set()
        assert begun[not second].wait(60)
        return begin(agent, transfer)

    monkeypatch.setattr(Agent, "begin", both)
    pull = two_agents.pull()
    pull.done.result(60)
    assert pull.terminal.is_set()
    assert np.array_equal(two_agents.memory, two_agents.had)


@pytest.mark.parametrize("failing", ["first", "second"])
def test_an_error_of_one_agent_ends_no_pull_of_which_the_other_still_writes(
    two_agents, monkeypatch, failing
):
    flying, landed, failed = threading.Event(), threading.Event(), threading.Event()
    check = Agent.check

    def begin(agent, transfer):
        if two_agents.is_second(agent) == (failing == "second"):
            assert flying.wait(60)
            failed.set()
            raise AgentError("planted")
        flying.set()
        return False

    def still_flies(agent, transfer):
        if landed.is_set():
            return check(agent, transfer) or True
        return False

    monkeypatch.setattr(Agent, "begin", begin)
    monkeypatch.setattr(Agent, "check", still_flies)
    pull = two_agents.pull()
    assert failed.wait(60)
    failed_thread = two_agents.second if failing == "second" else two_agents.reader._thread
    for thread in (two_agents.reader._thread, two_agents.second):
        for _ in range(3):
            thread.call(lambda: None)
        until(lambda thread=thread: len(thread._parts) == (thread is not failed_thread))
    assert pull.stopped
    assert not pull.terminal.is_set()
    assert not pull.done.done()
    landed.set()
    with pytest.raises(PullFailed, match="planted"):
        pull.done.result(60)
    assert pull.terminal.is_set()


def test_a_second_agent_that_does_not_reach_the_peer_is_not_needed(two_agents, monkeypatch):
    def unreached(peer, metadata):
        raise AgentError("planted")

    monkeypatch.setattr(two_agents.second, "reach", unreached)
    two_agents.pull().done.result(60)
    assert np.array_equal(two_agents.memory, two_agents.had)


def test_a_second_agent_that_comes_late_is_not_waited_for(two_agents, monkeypatch):
    late = threading.Event()
    two_agents.second._put(lambda: late.wait(60))
    pull = two_agents.pull()
    pull.done.result(60)
    assert pull.terminal.is_set()
    late.set()
    two_agents.second.call(lambda: None)
    assert not two_agents.second._parts


def test_a_second_agent_is_made_only_where_the_kernel_copies(transport_of, monkeypatch):
    monkeypatch.setattr(nixl_transport, "_cores", lambda: 2)
    assert transport_of("nixl", tls="tcp")._second is None
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    assert transport_of("nixl")._second is None
    monkeypatch.delenv("UCX_TLS")
    monkeypatch.setattr(nixl_transport, "_cores", lambda: 1)
    assert transport_of("nixl")._second is None
