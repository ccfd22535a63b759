"""A server under many clients for long: slow forms."""

from __future__ import annotations

import itertools
import random
import socket
import struct
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest
from server_process import ServerProcess, request_bytes, running, wait_until

pytestmark = pytest.mark.slow

STREAMS = 200
REQUESTS = 10_000


@pytest.mark.timeout(600)
def test_two_hundred_streams_at_once(model: Path, tmp_path: Path):
    """Beside them readers that stall, clients that vanish, and bodies that are wrong."""
    arguments = ("--client-timeout", "30", "--kv-cache-tokens", "65536")
    with running(model, tmp_path / "output", *arguments) as server, server.client() as client:
        asked = {"model": "tiny", "max_tokens": 40, "temperature": 0}
        prompts = [f"stream {number} of many, " * (1 + number % 5) for number in range(STREAMS)]
        alone = [client.completions.create(prompt=one, **asked).choices[0].text for one in prompts]
        gate = threading.Barrier(STREAMS)

        def stream(prompt: str) -> str:
            gate.wait(60)
            chunks = client.completions.create(prompt=prompt, stream=True, **asked)
            return "".join(chunk.choices[0].text for chunk in chunks)

        with ThreadPoolExecutor(STREAMS + 1) as threads:
            trouble = threads.submit(_trouble, server, rounds=40)
            assert list(threads.map(stream, prompts)) == alone
            trouble.result()
        wait_until(lambda: server.live() == 0, "nothing is left")
        assert server.figure("kvconnect_http_answers_total", status="500") == 0
        assert server.stop() == 0


def _trouble(server: ServerProcess, rounds: int) -> None:
    rng = random.Random(1)
    long = {"prompt": "long", "max_tokens": 3000, "ignore_eos": True, "logprobs": 20}
    stalled = []
    for number in range(rounds):
        match number % 4:
            case 0:
                one = server.connect(receive_buffer=4096)
                one.sendall(request_bytes(long | {"stream": True}))
                stalled.append(one)
            case 1:
                one = server.connect()
                one.sendall(request_bytes(long)[: rng.randrange(1, 300)])
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.close()
            case 2:
                assert server.post(b"[" * 10_000)[0] == 400
            case 3:
                assert server.post(b" " * (5 << 20))[0] == 413
    for one in stalled:
        one.close()


@pytest.mark.timeout(900)
def test_ten_thousand_requests_leave_nothing_behind(model: Path, tmp_path: Path):
    arguments = ("--kv-cache-tokens", "16384", "--store", "memory:?capacity=16MiB")
    with running(model, tmp_path / "output", *arguments) as server:
        process = psutil.Process(server.pid)
        numbers = itertools.count()

        def ask(client: openai.OpenAI) -> None:
            number = next(numbers)
            stream = number % 3 == 0
            answer = client.completions.create(
                model="tiny", prompt=f"request {number}", max_tokens=4, stream=stream
            )
            for _ in answer if stream else ():
                if number % 6 == 0:
                    answer.close()  # leave in the middle
                    break

        def many(count: int) -> None:
            with server.client() as client, ThreadPoolExecutor(16) as threads:
                for done in [threads.submit(ask, client) for _ in range(count)]:
                    done.result()
            wait_until(lambda: server.live() == 0, "nothing is left")

        many(REQUESTS // 4)
        before = (process.memory_info().rss, process.num_fds(), process.num_threads())
        mapped = _mappings(process)
        many(REQUESTS - REQUESTS // 4)
        after = (process.memory_info().rss, process.num_fds(), process.num_threads())
        grown = (_mappings(process) - mapped).most_common(5)
        assert after[0] - before[0] < 16 << 20, f"of MiB, by mapping: {grown}"
        assert after[1] <= before[1] + 16, "idle connections of the client apart"
        assert after[2] <= before[2] + 4, "threads of pools apart"
        assert server.figure("kvconnect_device_blocks", state="used") == 0
        assert server.stop() == 0


def _mappings(process: psutil.Process) -> Counter[str]:
    """Returns the resident MiB of each mapping, by address, name and size in MiB."""
    maps = process.memory_maps(grouped=False)
    return Counter({f"{one.addr} {one.path} {one.size >> 20}": one.rss >> 20 for one in maps})
