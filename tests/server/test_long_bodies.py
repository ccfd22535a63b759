"""What takes long is done where nothing else waits for it."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx2
import pytest
from starlette.requests import Request

from kvconnect.errors import ConfigurationError
from kvconnect.server.admission import Admission
from kvconnect.server.app import make_app
from kvconnect.server.endpoint import Service
from kvconnect.server.errors import RequestRefused
from kvconnect.server.http.body import parse_json, read_json
from kvconnect.server.route.routed import RoutedRequest
from kvconnect.server.settings import HttpSettings, ServerSettings
from kvconnect.server.threads import ServerThreads


@pytest.fixture
def parsing():
    with ThreadPoolExecutor(1) as thread:
        yield thread


def posted(body: object) -> Request:
    sent = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    headers = [(b"content-type", b"application/json")]

    async def receive():
        return sent.pop()

    return Request({"type": "http", "headers": headers}, receive)


@pytest.fixture
def place():
    """It counts against nothing."""
    with Admission(1, 1 << 30).enter() as ticket:
        yield ticket


async def test_the_loop_goes_on_while_a_long_body_is_parsed(parsing, place):
    begun, go_on = threading.Event(), threading.Event()

    def make(body):
        begun.set()
        assert go_on.wait(60)
        return len(body["prompt"])

    body = {"prompt": [1] * 100_000}
    reading = asyncio.create_task(read_json(posted(body), HttpSettings(), parsing, make, place))
    async with asyncio.timeout(60):
        while not begun.is_set():  # noqa: ASYNC110  it is another thread's
            await asyncio.sleep(0)
    go_on.set()
    assert await reading == 100_000


async def test_a_short_body_takes_no_turn_on_the_thread(parsing, place):
    go_on = threading.Event()
    parsing.submit(go_on.wait, 20)
    assert await read_json(posted({"prompt": "short"}), HttpSettings(), parsing, dict, place) == {
        "prompt": "short"
    }
    go_on.set()


class Slow:
    """An engine that does nothing until it is told to."""

    max_seq_len = 100
    events_address = None
    tokenizer = None
    layout = SimpleNamespace(tokens_per_block=16)

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()

    def submit(self, prompt, *_, **__):
        self.begun.release()
        assert self.go_on.wait(60)
        raise ConfigurationError("prompt: it is too long")

    def check_health(self) -> None:
        pass


async def test_metrics_are_told_while_texts_become_tokens():
    engine = Slow()
    settings = ServerSettings(model_names=("slow",))
    with ServerThreads() as threads:
        app = make_app(Service(engine, settings, Admission(100, 1 << 20), threads))
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
            texts = [
                asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
                for _ in range(50)
            ]
            async with asyncio.timeout(60):
                while not engine.begun.acquire(blocking=False):  # noqa: ASYNC110
                    await asyncio.sleep(0)
                assert (await client.get("/health")).status_code == 200
                assert "kvconnect_" in (await client.get("/metrics")).text
            engine.go_on.set()
            assert {one.status_code for one in await asyncio.gather(*texts)} == {400}


# ------------------------------------------------------------------------------------ the router


@pytest.mark.parametrize(
    "prompt",
    ["Gr\u00fc\u00dfe \u4e16\u754c", [1, 2, 3], list(range(50_000)), [[1] * 40_000, [2]], [], [[]]],
)
def test_what_the_router_passes_on_is_what_came(prompt):
    body = {"prompt": prompt, "n": 2, "stream": True, "stop": ["a\n", '"'], "x": {"y": None}}
    request = RoutedRequest.of("/v1/completions", body | {"kv_transfer_params": None})
    assert json.loads(request.body()) == body
    carried = {"transfer_id": "one"}
    sent = json.loads(request.body(carried, without=("n", "stream")))
    assert sent == {name: value for name, value in body.items() if name not in {"n", "stream"}} | {
        "kv_transfer_params": carried
    }
    assert json.loads(RoutedRequest.of("/x", {}).body(carried)) == {"kv_transfer_params": carried}


@pytest.mark.parametrize("value", [b"1e999", b'{"a": [-1e999]}'])
def test_a_number_that_no_server_could_be_told_is_named(value):
    body = parse_json(b'{"prompt": "x", "metadata": %s}' % value, max_nbytes=1 << 20)
    with pytest.raises(RequestRefused, match="has a number that is too large") as refused:
        RoutedRequest.of("/v1/completions", body)
    assert refused.value.status == 400
