"""A server that answers many requests: a slow form."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest
from server_process import running, wait_until

pytestmark = pytest.mark.slow

REQUESTS = 10_000


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
