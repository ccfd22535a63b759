"""Processes that save blocks until they are killed: a fork server, so that each starts at once.

Reads jobs from stdin, one JSON object a line, forks a process for each, and writes to stdout:
``started N PID``, ``acked N FIRST COUNT`` (blocks FIRST … FIRST + COUNT - 1 are stored, says the
store), ``ended N STATUS``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
import traceback

import numpy as np
import torch

from kvconnect.backend import StoredBlock
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.keys import BlockKey


def key_of(seed: int, number: int) -> BlockKey:
    return BlockKey(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=32).digest())


def content_of(key: BlockKey, nbytes: int) -> torch.Tensor:
    whole = np.frombuffer(key * (nbytes // len(key) + 1), np.uint8)[:nbytes]
    return torch.from_numpy(whole.copy())


def tell(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # one write: lines never mix


async def save(job: dict[str, object]) -> None:
    store = DiskBackend(job["path"], capacity=job["capacity"])
    left = job.get("visits", 1)

    def at(point: str) -> None:
        nonlocal left
        if point == job.get("point"):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    store.at = at
    await store.open([])
    nbytes, batch = job["nbytes"], job["batch"]
    for first in range(0, job["blocks"], batch):
        keys = [key_of(job["seed"], first + i) for i in range(batch)]
        parents = [key_of(job["seed"], first - 1) if first else None, *keys]
        stored = await store.save(
            [StoredBlock(k, content_of(k, nbytes), p) for k, p in zip(keys, parents, strict=False)]
        )
        tell("acked", job["number"], first, stored)
    await store.close()


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if not pid:
            try:
                asyncio.run(save(job))
            except BaseException:  # noqa: BLE001 - the child must not go on as the server
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        tell("started", job["number"], pid)
        if job.get("wait", True):
            tell("ended", job["number"], os.waitpid(pid, 0)[1])
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return
        tell("ended", pid, status)


if __name__ == "__main__":
    main()
