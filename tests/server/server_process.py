"""A server in a process of its own, and clients of it."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import openai
import server_child
from prometheus_client.parser import text_string_to_metric_families

DEADLINE_S = 60.0
_LISTENS = re.compile(r"http://127\.0\.0\.1:(\d+)/(?:v1|page)\n")
_CONTEXT = multiprocessing.get_context("forkserver")
_OF_MODEL = ("--served-model-name", "tiny", "--dtype", "float64", "--tokens-per-block", "16")


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll `condition` until it holds; fails with `what` if it does not."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.01)


class ServerProcess:
    """``kvconnect serve``, started and listening; without a `model`, ``kvconnect route``.

    With `serve` it is what that child runs, such as ``kvconnect page``.
    """

    def __init__(
        self,
        model: Path | None,
        output: Path,
        *arguments: str,
        serve: Callable[[Path, list[str]], None] | None = None,
    ) -> None:
        self.output = output
        of_model = () if model is None else (str(model), *_OF_MODEL)
        everything = [*of_model, "--port", "0", *arguments]
        target = serve or (server_child.route if model is None else server_child.serve)
        self.process = _CONTEXT.Process(target=target, args=(output, everything))
        self.process.start()
        self.pid: int = self.process.pid
        wait_until(self._is_up, "the server listens")
        self.port = int(_LISTENS.search(self.said())[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def _is_up(self) -> object:
        assert self.process.is_alive(), self.said()
        return _LISTENS.search(self.said())

    def said(self) -> str:
        """What it printed so far."""
        return self.output.read_text() if self.output.exists() else ""

    @contextmanager
    def client(self, **options: object) -> Iterator[openai.OpenAI]:
        """The official client; repeats nothing."""
        options = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0} | options
        with openai.OpenAI(**options) as client:
            yield client

    def connect(self, *, receive_buffer: int | None = None) -> socket.socket:
        """A bare connection."""
        one = socket.socket()
        if receive_buffer is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        one.settimeout(DEADLINE_S)
        one.connect(("127.0.0.1", self.port))
        return one

    def post(
        self,
        body: object,
        path: str = "/v1/completions",
        *,
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
    ) -> tuple[int, dict[str, object], Mapping[str, str]]:
        """Status, JSON and headers of the answer to `body`: bytes as they are, all else as JSON."""
        status, answer, told = self.raw(body, path, headers=headers, method=method)
        return status, json.loads(answer), told

    def raw(
        self,
        body: object,
        path: str = "/v1/completions",
        *,
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """The same with the answer as it came."""
        with self._asked(body, path, headers=headers, method=method) as answer:
            return answer.status, answer.read(), dict(answer.getheaders())

    def events(self, body: object, path: str = "/v1/completions") -> list[dict[str, object]]:
        """The events of the stream that answers `body`, without the one that ends it."""
        with self.streaming(body, path) as lines:
            found = list(lines)
        assert found.pop() == "[DONE]"
        return [json.loads(line) for line in found]

    @contextmanager
    def streaming(self, body: object, path: str = "/v1/completions") -> Iterator[Iterator[str]]:
        """The data of these events as they come; the client leaves at the end."""
        with self._asked(body, path) as answer:
            assert answer.status == 200
            lines = (line.decode().strip() for line in answer)
            yield (line.removeprefix("data: ") for line in lines if line)

    @contextmanager
    def _asked(
        self,
        body: object,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            sent = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"Content-Type": "application/json"} | dict(headers or {})
            connection.request(method, path, sent, headers)
            yield connection.getresponse()
        finally:
            connection.close()

    def figure(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels, as it is now."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=DEADLINE_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            return sum(
                sample.value
                for family in families
                for sample in family.samples
                if sample.name == name and labels.items() <= sample.labels.items()
            )

    def live(self) -> float:
        """Requests in the engine."""
        return sum(
            self.figure("kvconnect_live_requests", state=state)
            for state in ("waiting", "loading", "running")
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int | None:
        """Ask it to end; returns the exit code."""
        os.kill(self.pid, number)
        return self.wait()

    def wait(self) -> int | None:
        """Its exit code."""
        self.process.join(DEADLINE_S)
        assert not self.process.is_alive(), self.said()
        return self.process.exitcode

    def kill(self) -> None:
        """End it as a crash does. Idempotent."""
        self.process.kill()
        self.process.join()
        self.process.close()


@contextmanager
def running(
    model: Path | None, output: Path, *arguments: str, **how: Callable[[Path, list[str]], None]
) -> Iterator[ServerProcess]:
    """A server that is gone afterwards, however."""
    server = ServerProcess(model, output, *arguments, **how)
    try:
        yield server
    finally:
        server.kill()


def request_bytes(body: object, path: str = "/v1/completions") -> bytes:
    """An HTTP request as it goes over the wire."""
    sent = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(sent)}\r\n\r\n"
    )
    return head.encode() + sent
