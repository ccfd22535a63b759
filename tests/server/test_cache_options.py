"""The field ``kvconnect`` over HTTP: each request says how it uses stores."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess, running, wait_until

CHAT = "/v1/chat/completions"
PATHS = ("/v1/completions", CHAT)


@pytest.fixture(scope="module")
def stored(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a store that takes blocks of a priority of at least 30."""
    output = tmp_path_factory.mktemp("stored") / "output"
    options = ("--store", "memory:?capacity=1GiB", "--lookup-timeout", "60s", "--no-overlap-loads")
    with running(model, output, *options, "--min-priority", "30") as one:
        yield one


def body(path: str, name: str, **kvconnect: object) -> dict[str, object]:
    name = hashlib.sha256(f"{path} {name}".encode()).hexdigest()
    text = f"{name} begins the prompts of one test and of no other. " * 2
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    kvconnect["explain"] = True
    return {"max_tokens": 1, "temperature": 0, "kvconnect": kvconnect} | asked


def outcomes(
    server: ServerProcess, path: str, asked: dict[str, object], *, streams: bool = False
) -> set[tuple[str, str]]:
    """Asks, and returns the outcomes of the prompt's tokens but the last, with their details.

    The beginning that all chats share is not told apart from the rest.
    """
    if streams:
        told = {"stream": True, "stream_options": {"include_usage": True}}
        answer = server.events(asked | told, path)[-1]
    else:
        status, answer, _ = server.post(asked, path)
        assert status == 200, answer
    (found,) = answer["usage"]["kvconnect"]["explain"]
    spans = [one for one in found["spans"] if one["outcome"] not in {"new", "last"}]
    return {(one["outcome"], one.get("detail", "")) for one in spans if one["end"] > 64}


def drop_device(server: ServerProcess) -> None:
    wait_until(
        lambda: server.raw({}, "/reset_prefix_cache")[0] == 200, "no block is being saved any more"
    )


@pytest.mark.parametrize(("path", "streams"), [*zip(PATHS, (False, True), strict=True)])
def test_loads_and_saves_are_refused_for_one_request(stored: ServerProcess, path, streams):
    name = f"loads and saves {streams}"

    def ask(**kvconnect: object) -> set[tuple[str, str]]:
        drop_device(stored)
        return outcomes(stored, path, body(path, name, **kvconnect), streams=streams)

    ask(save=False)
    assert ask() == {("not_saved", "refused by the request")}
    assert ask(load=False) == {("not_loaded", "")}
    assert ask() == {("reused", "")}


def test_the_priority_is_that_of_all_its_blocks(stored: ServerProcess):
    def ask(**kvconnect: object) -> set[tuple[str, str]]:
        drop_device(stored)
        return outcomes(stored, CHAT, body(CHAT, "priority", **kvconnect))

    ask(priority=29, ttl="1h")
    assert ask(priority=30, ttl="1h") == {("not_saved", "below min_priority")}
    assert ask() == {("reused", "")}
    assert "the ttl of requests" not in stored.said()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("laod", False, "unknown field 'laod'; did you mean 'load'"),
        ("load", "false", "KvConnectOptions.load='false'"),
        ("save", 0, "KvConnectOptions.save=0"),
        ("priority", 101, "KvConnectOptions.priority=101"),
        ("priority", 80.5, "KvConnectOptions.priority=80.5"),
        ("ttl", "soon", "KvConnectOptions.ttl='soon': a duration such as 30s, 12h or 7d is needed"),
        ("ttl", -1, "KvConnectOptions.ttl=-1"),
        ("ttl", True, "KvConnectOptions.ttl=True"),
    ],
)
def test_a_wrong_field_is_named(server: ServerProcess, path: str, field, value, complaint):
    status, answer, _ = server.post(body(path, "wrong", **{field: value}), path)
    assert status == 400
    assert complaint in answer["error"]["message"], answer
