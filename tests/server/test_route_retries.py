"""What the router tries again, and what it sends: before servers that answer as they are told."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import httpx2
import pytest
import uvicorn
from server_process import request_bytes
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvconnect.server.admission import Admission
from kvconnect.server.http.disconnect import while_connected
from kvconnect.server.route import client as route_client
from kvconnect.server.route.fleet import Fleet
from kvconnect.server.route.run import ask_all, make_app
from kvconnect.server.route.settings import RouteSettings
from kvconnect.server.trust import ROUTER_SECRET_HEADER

BODY = {"prompt": "x" * 300, "max_tokens": 7, "n": 2}
ADDRESS = {"remote_host": "127.0.0.1", "remote_port": 7600}


class FakeServer:
    """Answers with what `say` gives, and remembers what it was asked."""

    def __init__(self, say: Callable[[dict[str, Any]], Any]) -> None:
        self.say = say
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        body = await request.json()
        self.asked.append(body)
        self.headers.append(request.headers)
        said = self.say(body)
        if asyncio.iscoroutine(said):
            try:
                said = await while_connected(receive, said)
            except ClientDisconnect:
                self.left.set()
                return
        await said(scope, receive, send)


def computed(body):
    """As a prefill server answers."""
    given = body["kv_transfer_params"]["transfer_id"] or "its own"
    told = {"do_remote_prefill": True, "transfer_id": given, "remote_engine_id": "e", **ADDRESS}
    return JSONResponse({"kv_transfer_params": told})


def answered(body):
    """As a decode server answers."""
    return JSONResponse({"choices": [{"text": "done"}]})


def refused(status):
    return lambda body: JSONResponse({"error": {"message": f"it says {status}"}}, status)


async def silence(body):
    await asyncio.sleep(60)


def streamed(*events, break_off=False):
    async def pieces() -> AsyncIterator[bytes]:
        for event in events:
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        if break_off:
            raise RuntimeError("it breaks off")
        yield b"data: [DONE]\n\n"

    return lambda body: StreamingResponse(pieces(), media_type="text/event-stream")


TOKEN = {"choices": [{"text": "x"}]}
ROLE = {"choices": [{"delta": {"role": "assistant"}}]}


class Routed:
    """A router before fake servers."""

    def __init__(self, prefill: list[FakeServer], decode: list[FakeServer], app: Any) -> None:
        self.prefill, self.decode = prefill, decode
        self.client = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app), base_url="http://router", timeout=60
        )

    async def post(self, **more: Any) -> httpx2.Response:
        return await self.client.post("/v1/completions", json=BODY | more)


@pytest.fixture
async def routed() -> AsyncIterator[Callable[..., Any]]:
    """Starts a router before servers that say `prefill` and `decode`; ``None``: that are gone."""
    async with AsyncExitStack() as stack:

        async def start(prefill: list[Any], decode: list[Any], **settings: Any) -> Routed:
            servers = [FakeServer(say) for say in (*prefill, *decode)]
            urls = [
                await stack.enter_async_context(listening(one)) if one.say else nowhere()
                for one in servers
            ]
            made = RouteSettings(
                prefill=tuple(urls[: len(prefill)]), decode=tuple(urls[len(prefill) :]), **settings
            )
            fleet, parsing = Fleet(made), stack.enter_context(ThreadPoolExecutor(1))
            stack.push_async_callback(fleet.close)
            app = make_app(fleet, Admission(made.max_requests, 1 << 20, "requests"), parsing)
            one = Routed(servers[: len(prefill)], servers[len(prefill) :], app)
            await stack.enter_async_context(one.client)
            return one

        yield start


def nowhere() -> str:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        return f"http://127.0.0.1:{nobody.getsockname()[1]}"


class FakeHost(uvicorn.Server):
    """Listens, and ends at once."""

    def __init__(self, app: Callable[..., Any]) -> None:
        super().__init__(uvicorn.Config(app, port=0, lifespan="off", log_config=None, log_level=60))
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def main_loop(self) -> None:
        await asyncio.Event().wait()


@asynccontextmanager
async def listening(app: Callable[..., Any]) -> AsyncIterator[str]:
    host = FakeHost(app)
    serving = asyncio.create_task(host._serve())
    await host.up.wait()
    yield f"http://127.0.0.1:{host.servers[0].sockets[0].getsockname()[1]}"
    for one in host.servers:
        one.close()
    for connection in list(host.server_state.connections):
        connection.transport.abort()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


# ------------------------------------------------------------------------------ what is sent


async def test_the_prefill_server_is_asked_for_the_prompt_only(routed):
    one = await routed([computed], [answered], router_secret="a-secret", instance_api_key="key")
    for number in range(2):
        answer = await one.post(stream=False, prompt=f"{number}" * 300, min_tokens=1)
        assert answer.json() == {"choices": [{"text": "done"}]}
    first, second = one.prefill[0].asked
    assert first == {
        "prompt": "0" * 300,
        "max_tokens": 7,  # by which a prompt may be too long
        "kv_transfer_params": {"do_remote_decode": True, "transfer_id": None},
    }
    assert one.decode[0].asked[0]["kv_transfer_params"]["transfer_id"] == "its own"
    assert one.decode[0].asked[0]["max_tokens"] == 7
    # From then on its address is known.
    name = second["kv_transfer_params"]["transfer_id"]
    assert one.decode[0].asked[1]["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "transfer_id": name,
        **ADDRESS,
    }
    for headers in (*one.prefill[0].headers, *one.decode[0].headers):
        assert headers["authorization"] == "Bearer key"
        assert headers[ROUTER_SECRET_HEADER] == "a-secret"


async def test_servers_get_the_names_of_the_clients_trace(routed):
    one = await routed([computed], [answered])
    named = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": "vendor=1"}
    await one.client.post("/v1/completions", json=BODY, headers=named)
    for headers in (*one.prefill[0].headers, *one.decode[0].headers):
        assert {name: headers[name] for name in named} == named


async def test_one_after_the_other_if_told_to(routed):
    one = await routed([computed], [answered], stream_layers=False)
    for number in range(2):
        await one.post(prompt=f"{number}" * 300)
    assert {asked["kv_transfer_params"]["transfer_id"] for asked in one.decode[0].asked} == {
        "its own"
    }


async def test_the_clients_parameters_are_never_passed_on(routed):
    one = await routed([computed], [answered])
    answer = await one.post(kv_transfer_params={"remote_host": "192.0.2.1"})
    assert answer.status_code == 403
    assert (await one.post(kv_transfer_params=None)).status_code == 200
    assert "192.0.2.1" not in json.dumps([one.prefill[0].asked, one.decode[0].asked])


# ------------------------------------------------------------------------------ what is tried again


@pytest.mark.parametrize("status", [429, 500, 503, 401, 302])
async def test_another_prefill_server_is_tried(routed, status):
    one = await routed([refused(status), computed], [answered])
    for number in range(4):
        assert (await one.post(prompt=f"{number}" * 300)).status_code == 200
    assert len(one.prefill[1].asked) == 4
    assert all(asked["kv_transfer_params"] for asked in one.decode[0].asked)


@pytest.mark.parametrize("prefill", [[answered], [None], [silence, silence]])
async def test_a_prefill_server_that_is_gone_late_or_gives_no_parameters_is_none(routed, prefill):
    one = await routed(prefill, [answered], prefill_timeout_s=60.0 if len(prefill) < 2 else 0.2)
    assert (await one.post()).status_code == 200
    assert "kv_transfer_params" not in one.decode[0].asked[0]


async def test_a_server_that_is_gone_is_down(routed):
    one = await routed([None], [None])
    answer = await one.post()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_decode_server")
    assert answer.headers["retry-after"] == "1"
    assert "127.0.0.1" not in answer.text
    assert (await one.client.get("/health")).status_code == 503


async def test_while_both_are_asked_a_prefill_that_fails_ends_the_fetch(routed):
    one = await routed([computed], [answered])
    await one.post()
    one.prefill[0].say = refused(503)

    async def waits(body):
        if "kv_transfer_params" in body:
            await silence(body)
        return answered(body)

    one.decode[0].say = waits
    answer = await one.post(prompt="y" * 300)
    assert answer.status_code == 200
    assert "kv_transfer_params" not in one.decode[0].asked[-1], "it computes itself"


@pytest.mark.parametrize(
    "fails",
    [
        refused(503),
        refused(500),
        streamed({"error": {"message": "x"}}),
        streamed(ROLE, {"error": {"message": "x"}}),
        streamed(ROLE, break_off=True),
    ],
)
async def test_until_the_first_token_another_decode_server_is_tried(routed, fails):
    one = await routed([computed], [fails, fails, streamed(ROLE, TOKEN, TOKEN)])
    answer = await one.post(stream=True)
    assert answer.status_code == 200
    assert answer.text.count('"text": "x"') == 2
    assert answer.text.count("role") == 1
    assert "error" not in answer.text


async def test_after_the_first_token_the_stream_ends_with_an_error(routed):
    one = await routed([], [streamed(TOKEN, break_off=True), answered])
    answer = await one.post(stream=True)
    events = answer.text.split("\n\n")
    assert json.loads(events[0].removeprefix("data: ")) == TOKEN
    assert "broke off" in json.loads(events[1].removeprefix("data: "))["error"]["message"]
    assert events[2] == "data: [DONE]"
    assert not one.decode[1].asked


@pytest.mark.parametrize(
    ("decode", "within_s", "status", "code"),
    [
        ([refused(429), refused(503)], 20.0, 429, "queue_full"),
        ([refused(429), refused(500)], 20.0, 503, "no_decode_server"),
        ([silence], 0.5, 504, "timeout"),
    ],
)
async def test_when_none_is_left_the_reason_is_told(routed, decode, within_s, status, code):
    one = await routed([computed], decode, request_timeout_s=within_s)
    answer = await one.post()
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "127.0.0.1" not in answer.text


@pytest.mark.parametrize("status", [400, 404, 413])
async def test_what_the_client_did_wrong_is_not_tried_again(routed, status):
    one = await routed([refused(status)] * 2, [answered])
    answer = await one.post()
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, f"it says {status}")
    assert len(one.prefill[0].asked) + len(one.prefill[1].asked) == 1


async def test_a_request_that_is_given_up_ends_on_its_servers(routed):
    one = await routed([computed], [answered])
    await one.post()
    for server in (*one.prefill, *one.decode):
        server.say = silence
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await one.post(prompt="y" * 300)
    for server in (*one.prefill, *one.decode):
        async with asyncio.timeout(60):
            await server.left.wait()


async def test_an_answer_that_needs_no_prefill_any_more_ends_it(routed):
    one = await routed([computed], [answered])
    await one.post()
    one.prefill[0].say = silence
    assert (await one.post(prompt="y" * 300)).status_code == 200
    async with asyncio.timeout(60):
        await one.prefill[0].left.wait()


async def test_a_decode_server_that_has_the_prompt_waits_for_none(routed):
    one = await routed([computed], [answered], stream_layers=False)
    await one.post()
    one.prefill[0].say = silence
    async with asyncio.timeout(60):
        assert (await one.post()).status_code == 200
        await one.prefill[0].left.wait()


async def test_once_the_answer_has_begun_nothing_more_is_computed_for_it(routed):
    one = await routed([computed], [answered])
    await one.post()
    one.prefill[0].say = silence

    async def pieces():
        yield b"data: " + json.dumps(TOKEN).encode() + b"\n\n"
        async with asyncio.timeout(60):
            await one.prefill[0].left.wait()
        yield b"data: [DONE]\n\n"

    one.decode[0].say = lambda body: StreamingResponse(pieces(), media_type="text/event-stream")
    answer = await one.post(stream=True)
    assert "broke off" not in answer.text


def _answers_after(seconds: float) -> Callable[..., Any]:
    """A server that takes so long for each answer, unless it is given up."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        with suppress(ClientDisconnect):
            await while_connected(receive, asyncio.sleep(seconds))
            await JSONResponse({})(scope, receive, send)

    return answer


def _stopped(after_s: float, seconds: float) -> None:
    """Nothing runs for so long, as in a process that is stopped, or on a host that is."""
    asyncio.get_running_loop().call_later(after_s, time.sleep, seconds)


@asynccontextmanager
async def asking(after_s: float, **settings: float) -> AsyncIterator[Fleet]:
    """A router's side of one decode server that takes so long for each answer."""
    async with listening(_answers_after(after_s)) as url:
        fleet = Fleet(RouteSettings(decode=(url,), **settings))
        yield fleet
        await fleet.close()


async def test_a_router_that_was_stopped_does_not_take_its_servers_for_dead():
    async with asking(0.1, health_timeout_s=1.0) as fleet:
        _stopped(0.05, 1.2)
        await ask_all(fleet)
        assert fleet.decode[0].down is None


async def test_a_server_that_does_not_say_how_it_is_counts_as_dead_in_time():
    async with asking(120, health_timeout_s=0.3) as fleet:
        started = time.monotonic()
        await ask_all(fleet)
        assert fleet.decode[0].down is not None
        assert time.monotonic() - started < 60


async def test_a_router_that_is_stopped_while_it_connects_connects_again(monkeypatch):
    monkeypatch.setattr(route_client, "_CONNECT_S", 0.2)
    async with asking(0) as fleet:
        (instance,) = fleet.decode
        _stopped(0, 1.0)
        post = fleet.client.post(instance, "/v1/completions", b"{}", transfers=False)
        async with post as answer:
            assert await answer.aread() == b"{}"
        assert instance.down is None


async def test_an_answer_to_a_client_that_left_fills_no_log(caplog):
    """The client left while the router was stopped, and much of its stream is there."""
    one = b'data: {"choices":[{"text":"x"}]}\n\n'
    more, sent = threading.Event(), threading.Event()

    def stream(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
            connection.sendall(b"%x\r\n%s\r\n" % (len(one), one))
            more.wait(60)
            connection.sendall(b"%x\r\n%s\r\n" % (len(one), one) * 300)
            sent.set()
            connection.recv(1)  # until the router leaves

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as threads:
        streaming = threads.submit(stream, listener)
        settings = RouteSettings(decode=(f"http://127.0.0.1:{listener.getsockname()[1]}",))
        fleet = Fleet(settings)
        app = make_app(fleet, Admission(8, 1 << 20, "requests"), threads)
        async with listening(app) as url:
            _, _, port = url.rpartition(":")
            reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
            writer.write(request_bytes(BODY | {"stream": True}))
            await reader.readuntil(one)
            more.set()
            assert sent.wait(60)  # as does the router: it runs in this thread
            writer.transport.abort()
            await asyncio.to_thread(streaming.result, 60)
        await fleet.close()
    assert "socket.send()" not in caplog.text


def _said(content: bytes, kind: str) -> Callable[..., Any]:
    return lambda body: Response(content, media_type=kind)


@pytest.mark.parametrize(
    "garbage",
    [
        _said(b"<html>", "text/html"),
        _said(b"data: {" + b'"a":{' * 100_000 + b"\n\n", "text/event-stream"),
        _said(b"data: {nothing}\n\n", "text/event-stream"),
    ],
)
async def test_what_is_no_answer_is_tried_on_another_server(routed, garbage):
    one = await routed([], [garbage, streamed(TOKEN)])
    answer = await one.post(stream=True)
    assert answer.status_code == 200
    assert json.loads(answer.text.split("\n\n")[0].removeprefix("data: ")) == TOKEN


async def test_events_of_another_form_are_passed_on(routed):
    event = {"choices": [1, {"delta": 1}]}
    one = await routed([], [streamed(event)])
    answer = await one.post(stream=True)
    assert json.loads(answer.text.split("\n\n")[0].removeprefix("data: ")) == event


@pytest.mark.parametrize(
    "said", [b"", b"[1]", b"[" * 100_000, b'{"data": 1}', b'{"data": [{}]}', b'{"events": {}}']
)
async def test_a_server_that_says_anything_of_itself_ends_no_router(said):
    async with listening(Response(said, media_type="application/json")) as url:
        fleet = Fleet(RouteSettings(decode=(url,)))
        with ThreadPoolExecutor(1) as parsing:
            app = make_app(fleet, Admission(8, 1 << 20, "requests"), parsing)
            await ask_all(fleet)
            assert fleet.decode[0].down is None
            transport = httpx2.ASGITransport(app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://router") as client:
                answer = await client.get("/v1/models")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_decode_server")
        await fleet.close()


async def test_what_a_server_has_against_its_router_is_in_the_log(routed, caplog):
    one = await routed([], [refused(403), answered])
    for _ in range(3):
        assert (await one.post(prompt="x")).status_code == 200
    (said,) = [line for line in caplog.messages if "it says 403" in line]
    assert said.startswith("decode 0 (http://127.0.0.1:")
