"""What `open` says of a Redis that is not there, not what it should be, or lets nobody in."""

from __future__ import annotations

import socket
import time
import traceback

import pytest
from redis_faults import Relay, Script

from kvconnect.backends import open_backend
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.trace import metrics

RETRY_OR_FIX = (ConfigurationError, BackendUnavailable)


async def opened(url):
    backend = open_backend(url)
    await backend.open([])
    await backend.close()


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


def speaks(name, said):
    """Answers of a server that says `said` to one command; without a name: to all of them."""

    def answer(command):
        asked = command[0].decode().upper()
        if name in {"", asked}:
            return said
        return b"+PONG\r\n" if asked == "PING" else b"+OK\r\n"

    return answer


def info(**fields):
    text = "".join(f"{name}:{value}\r\n" for name, value in fields.items()).encode()
    return b"$%d\r\n%s\r\n" % (len(text), text)


UNUSABLE = [
    ("redis://127.0.0.1:1", BackendUnavailable, r"127\.0\.0\.1.*refused"),
    ("redis://no-such-host.invalid", BackendUnavailable, r"no-such-host\.invalid"),
    ("redis://a..b", BackendUnavailable, "label empty or too long"),
    ("redis+unix:///none.sock", BackendUnavailable, "No such file"),
    ("redis://me:secret@HERE", ConfigurationError, "look at user and password"),
    ("redis://HERE/99", ConfigurationError, "path /99: the server has no such database"),
    ("redis+cluster://HERE", ConfigurationError, "it is no cluster; write redis://"),
    ("redis+sentinel://HERE/kv", ConfigurationError, "is no sentinel; write redis://"),
    ("rediss://HERE?timeout=300ms", RETRY_OR_FIX, "does not speak TLS, write redis://"),
]


@pytest.mark.parametrize(("url", "error", "says"), UNUSABLE)
async def test_what_cannot_be_used_is_told(redis_server, url, error, says):
    with pytest.raises(error, match=says):
        await opened(url.replace("HERE", f"127.0.0.1:{redis_server.port}"))


def slots(*ranges):
    """What a node of a cluster says of the servers of `ranges` of slots."""
    node = b"*2\r\n$9\r\n127.0.0.1\r\n:1\r\n"
    said = b"".join(b"*3\r\n:%d\r\n:%d\r\n%s" % (*one, node) for one in ranges)
    return b"*%d\r\n%s" % (len(ranges), said)


ODD = [
    ("redis", "INFO", info(server_mode="cluster"), r"write redis\+cluster://"),  # Valkey's word
    ("redis", "INFO", info(redis_mode="sentinel"), r"is a sentinel; write redis\+sentinel"),
    ("redis", "INFO", info(redis_version="5.0.7"), r"is version 5\.0\.7; 6\.2 is needed"),
    ("redis", "", b"HTTP/1.1 400 Bad Request\r\n\r\n", r"makes no sense|Protocol"),
    ("redis", "", b"-LOADING Redis is loading the dataset\r\n", "is loading its data"),
    *(
        ("redis+cluster", "CLUSTER", said, "where the cluster's slots were due")
        for said in (
            *(b"*0\r\n", b":1\r\n", b"*1\r\n:1\r\n", b"*1\r\n*2\r\n:0\r\n:16383\r\n"),
            slots((0, 9)).replace(b":1\r\n", b"$1\r\nx\r\n"),
            *(slots((0, 10_000_000)), slots((-5, 9)), slots((9, 5)), slots(*[(0, 16383)] * 99)),
        )
    ),
    *(
        ("redis+sentinel", "SENTINEL", said, "makes no sense")
        for said in (
            *(b":1\r\n", b"$-1\r\n", b"*1\r\n*0\r\n"),
            b"*1\r\n*2\r\n$4\r\nname\r\n$2\r\nkv\r\n",
        )
    ),
]


@pytest.mark.parametrize(("scheme", "command", "answer", "says"), ODD)
async def test_server_of_another_kind_or_of_odd_answers_is_told(
    script, scheme, command, answer, says
):
    path = "/kv" if scheme == "redis+sentinel" else ""
    error = ConfigurationError if command == "INFO" else BackendUnavailable
    with pytest.raises(error, match=says):
        await opened(script(speaks(command, answer)).replace("redis:", f"{scheme}:") + path)


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


@pytest.mark.parametrize("mode", ["redis", "redis+cluster", "redis+sentinel"])
async def test_a_server_that_quotes_what_it_was_told_gives_no_password_away(script, mode):
    def quoting(command):
        words = " ".join(f"'{word.decode()}'" for word in command[1:])
        return f"-ERR unknown command '{command[0].decode()}', with args: {words}\r\n".encode()

    url = script(quoting).replace("redis://", f"{mode}://me:Kx1q%40Ly2w@")
    if mode == "redis+sentinel":
        url += "/mymaster?sentinel_user=me&sentinel_password=Kx1q%40Ly2w"
    with pytest.raises(RETRY_OR_FIX) as caught:
        await opened(url)
    told = "".join(traceback.format_exception(caught.value))
    assert "Kx1q" not in told
    assert "Ly2w" not in told
    assert "unknown command" in str(caught.value) or mode != "redis"


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
