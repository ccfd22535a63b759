"""What `open` says of a Redis that is not there, not what it should be, or lets nobody in."""

from __future__ import annotations

import socket
import time
import traceback

import pytest
from redis_faults import Relay, Script
from redis_server import free_port

from kvconnect.backends import open_backend
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.trace import metrics


async def opened(url, **options):
    backend = open_backend(url, **options)
    await backend.open([])
    await backend.close()
    return backend


@pytest.fixture
def script():
    """Makes servers that answer as told."""
    servers = []

    def make(answer):
        servers.append(Script(answer))
        return f"redis://127.0.0.1:{servers[-1].port}"

    yield make
    for server in servers:
        server.close()


def speaks(**answers):
    """Answers of a server that has the commands of `answers`, and PONG."""

    def answer(command):
        name = command[0].decode().upper()
        text = answers.get(name, b"+PONG\r\n" if name == "PING" else b"+OK\r\n")
        return text(command) if callable(text) else text

    return answer


def info(**fields):
    text = "".join(f"{name}:{value}\r\n" for name, value in fields.items()).encode()
    return b"$%d\r\n%s\r\n" % (len(text), text)


async def test_nobody_listens():
    with pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1.*refused"):
        await opened(f"redis://127.0.0.1:{free_port()}")


async def test_no_such_host():
    with pytest.raises(BackendUnavailable, match=r"no-such-host\.invalid"):
        await opened("redis://no-such-host.invalid")


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster", "redis+sentinel"])
async def test_server_that_says_nothing_is_given_up_in_time(scheme):
    path = "/kv" if scheme == "redis+sentinel" else ""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        url = f"{scheme}://127.0.0.1:{silent.getsockname()[1]}{path}?timeout=300ms"
        with pytest.raises(
            BackendUnavailable, match=r"no answer|reached|timed out|Timeout|sentinel"
        ):
            await opened(url)
        assert time.monotonic() - start < 30


async def test_the_deadline_of_calls_holds_for_opening_too():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(OSError, match="longer than"):
            await opened(f"redis://127.0.0.1:{silent.getsockname()[1]}", deadline_s=0.3)
        assert time.monotonic() - start < 30


@pytest.mark.parametrize("userinfo", ["", ":wrong@", "nobody:secret@"])
async def test_wrong_credentials(redis_server, userinfo):
    with redis_server.configured(requirepass="secret"):
        redis_server.admin.connection_pool.connection_kwargs["password"] = "secret"
        try:
            with pytest.raises(ConfigurationError, match=r"look at user and password|give user"):
                await opened(f"redis://{userinfo}127.0.0.1:{redis_server.port}")
            await opened(f"redis://:secret@127.0.0.1:{redis_server.port}")
        finally:
            redis_server.admin.config_set("requirepass", "")
            del redis_server.admin.connection_pool.connection_kwargs["password"]


async def test_password_that_nobody_asked_for(redis_server):
    with pytest.raises(ConfigurationError, match="look at user and password"):
        await opened(f"redis://me:secret@127.0.0.1:{redis_server.port}")


@pytest.mark.parametrize("mode", ["redis", "redis+cluster", "redis+sentinel"])
async def test_a_server_that_quotes_what_it_was_told_gives_no_password_away(script, mode):
    def quoting(command):
        words = " ".join(f"'{word.decode()}'" for word in command[1:])
        return f"-ERR unknown command '{command[0].decode()}', with args: {words}\r\n".encode()

    url = script(quoting).replace("redis://", f"{mode}://me:Kx1q%40Ly2w@")
    if mode == "redis+sentinel":
        url += "/mymaster?sentinel_user=me&sentinel_password=Kx1q%40Ly2w"
    with pytest.raises((ConfigurationError, BackendUnavailable)) as caught:
        await opened(url)
    told = "".join(traceback.format_exception(caught.value))
    assert "Kx1q" not in told
    assert "Ly2w" not in told
    assert "unknown command" in str(caught.value) or mode != "redis"


async def test_no_such_database(redis_server):
    with pytest.raises(ConfigurationError, match="path /99: the server has no such database"):
        await opened(f"{redis_server.url}/99")


async def test_databases_are_apart(redis_server, kit):
    one, other = (open_backend(f"{redis_server.url}/{db}?prefix=db:") for db in (0, 1))
    await one.open([kit.layout])
    await other.open([kit.layout])
    await one.save([kit.block(kit.key(1))])
    assert await other.lookup([kit.key(1)]) == 0
    assert await one.lookup([kit.key(1)]) == 1
    await one.close()
    await other.close()


@pytest.mark.parametrize(
    "rules", ["+@all -set ~kv:*", "+@all ~other:*", "+ping +info", "+@read ~kv:*"]
)
async def test_user_who_may_not_do_it_is_told_what_is_needed(redis_server, rules):
    redis_server.admin.execute_command("ACL SETUSER", "limited", "on", ">pw", *rules.split())
    try:
        with pytest.raises(ConfigurationError, match=r"the user needs ~kv:\* \+@read \+@write"):
            await opened(f"redis://limited:pw@127.0.0.1:{redis_server.port}?prefix=kv:")
    finally:
        redis_server.admin.acl_deluser("limited")


async def test_user_with_the_rights_named_in_the_message_can_do_everything(redis_server, kit):
    rules = ["~kv:*", "+@read", "+@write", "+@connection", "+@keyspace", "+info"]
    redis_server.admin.execute_command("ACL SETUSER", "able", "on", ">pw", *rules)
    store = open_backend(f"redis://able:pw@127.0.0.1:{redis_server.port}?prefix=kv:").inner
    try:
        await store.open([])
        keys = kit.keys("rights", count=2)
        blocks = [
            kit.block(k, nbytes=n, tokens=[1]) for k, n in zip(keys, (10, 5 << 20), strict=True)
        ]
        assert await store.save(blocks) == 2
        assert await store.load(keys, [kit.buffer(10), kit.buffer(5 << 20)]) == 2
        assert len(await store.children(None)) == 2
        assert [entry async for entry in store.scan()]
        assert (await store.stats())["blocks"] == 2
        await store.delete(keys)
    finally:
        await store.close()
        redis_server.admin.acl_deluser("able")


async def test_node_of_a_cluster_is_no_single_server(redis_cluster):
    port = redis_cluster.nodes[0].port
    with pytest.raises(ConfigurationError, match=rf"write redis\+cluster://127.0.0.1:{port}"):
        await opened(f"redis://127.0.0.1:{port}")


async def test_valkey_has_another_word_for_its_kind(script):
    url = script(speaks(INFO=info(server_mode="cluster", redis_version="7.2.4")))
    with pytest.raises(ConfigurationError, match=r"write redis\+cluster://"):
        await opened(url)


async def test_single_server_is_no_cluster(redis_server):
    with pytest.raises(ConfigurationError, match="it is no cluster; write redis://"):
        await opened(f"redis+cluster://127.0.0.1:{redis_server.port}")


async def test_server_that_is_no_sentinel(redis_server):
    with pytest.raises(ConfigurationError, match="is no sentinel; write redis://"):
        await opened(f"redis+sentinel://127.0.0.1:{redis_server.port}/kv")


async def test_sentinel_that_says_nothing(script):
    silent = script(lambda _: b"").removeprefix("redis://")
    with pytest.raises(BackendUnavailable) as caught:
        await opened(f"redis+sentinel://{silent}/kv?timeout=200ms")
    assert "no answer for 0.2 s" in str(caught.value)
    assert "object at" not in str(caught.value)  # which is how redis-py describes its clients


async def test_sentinel_that_wants_a_password(redis_server):
    with (
        redis_server.configured(requirepass="secret"),
        pytest.raises(ConfigurationError, match="look at sentinel_user= and sentinel_password="),
    ):
        await opened(f"redis+sentinel://127.0.0.1:{redis_server.port}/kv")


async def test_socket_that_is_not_there(tmp_path):
    with pytest.raises(BackendUnavailable, match="No such file"):
        await opened(f"redis+unix://{tmp_path}/none.sock")


async def test_sentinel_is_no_server(script):
    url = script(speaks(INFO=info(redis_mode="sentinel", redis_version="7.0.0")))
    with pytest.raises(ConfigurationError, match=r"is a sentinel; write redis\+sentinel"):
        await opened(url)


async def test_server_that_is_too_old(script):
    url = script(speaks(INFO=info(redis_mode="standalone", redis_version="5.0.7")))
    with pytest.raises(ConfigurationError, match=r"is version 5\.0\.7; 6\.2 is needed"):
        await opened(url)


async def test_server_that_is_no_redis(script):
    url = script(lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(BackendUnavailable, match=r"makes no sense|Protocol"):
        await opened(url)


def slots(*ranges):
    """What a node of a cluster says of the servers of `ranges` of slots."""
    node = b"*2\r\n$9\r\n127.0.0.1\r\n:1\r\n"
    said = b"".join(b"*3\r\n:%d\r\n:%d\r\n%s" % (*one, node) for one in ranges)
    return b"*%d\r\n%s" % (len(ranges), said)


SLOTS = {
    "none": b"*0\r\n",
    "no list": b":1\r\n",
    "no ranges": b"*1\r\n:1\r\n",
    "nobody": b"*1\r\n*2\r\n:0\r\n:16383\r\n",
    "no port": slots((0, 9)).replace(b":1\r\n", b"$1\r\nx\r\n"),
    "too many": slots((0, 10_000_000)),
    "negative": slots((-5, 9)),
    "backwards": slots((9, 5)),
    "again and again": slots(*[(0, 16383)] * 99),
}


@pytest.mark.parametrize("said", SLOTS.values(), ids=SLOTS)
async def test_node_that_lies_about_its_cluster_is_not_believed(script, said):
    url = script(speaks(CLUSTER=said)).replace("redis:", "redis+cluster:")
    with pytest.raises(BackendUnavailable, match="where the cluster's slots were due"):
        await opened(url)


@pytest.mark.parametrize(
    "said", [b":1\r\n", b"$-1\r\n", b"*1\r\n*0\r\n", b"*1\r\n*2\r\n$4\r\nname\r\n$2\r\nkv\r\n"]
)
async def test_sentinel_that_makes_no_sense_says_so(script, said):
    url = script(speaks(SENTINEL=said)).replace("redis:", "redis+sentinel:")
    with pytest.raises(BackendUnavailable, match="makes no sense"):
        await opened(f"{url}/kv")


async def test_host_that_cannot_be_one():
    with pytest.raises(BackendUnavailable, match="label empty or too long"):
        await open_backend("redis://a..b").inner.open([])


async def test_server_that_loads_its_data(script):
    url = script(lambda _: b"-LOADING Redis is loading the dataset in memory\r\n")
    with pytest.raises(BackendUnavailable, match="is loading its data"):
        await opened(url)


async def test_tls_where_there_is_none(redis_server):
    url = f"rediss://127.0.0.1:{redis_server.port}?timeout=1s"
    with pytest.raises(
        (ConfigurationError, BackendUnavailable), match=r"does not speak TLS, write redis://"
    ):
        await opened(url)


async def test_server_that_keeps_nothing_new_when_full_is_warned_of(redis_server, caplog):
    metrics._warned.clear()
    with redis_server.configured(maxmemory="1gb", maxmemory_policy="noeviction"):
        await opened(redis_server.url)
    assert "maxmemory-policy is noeviction" in caplog.text


async def test_failed_open_leaves_nothing_and_can_be_repeated(redis_server, kit):
    relay = Relay(redis_server.port)
    store = open_backend(f"redis://127.0.0.1:{relay.port}")
    relay.change = lambda *_: None
    with pytest.raises(BackendUnavailable):
        await store.open([kit.layout])
    relay.change = lambda data, _: data
    await store.open([kit.layout])
    assert await store.lookup([kit.key("any")]) == 0
    await store.close()
    relay.close()
