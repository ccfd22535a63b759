"""What grows in an engine that answers thousands of requests: a process of its own.

A job comes by stdin, what was looked at goes to stdout: one `Look` for each tenth of the requests.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_engine import Engine, engine, prompts_of

from kvconnect.testing.processes.usage import descriptors
from kvconnect.trace import metrics

AT_ONCE = 50
LOOKS = 10
SETTLE_S = 30.0

ON_ITS_WAY = ("backend.StoredBlock", "staging.Slot", "lanes._Ended")
"""Classes of which there is one only while something is saved or loaded."""


@dataclass
class Look:
    """What may not grow with the number of requests.

    Attributes:
        descriptors, threads: of the process.
        entries: of all containers that the connector's two halves reach, but for the store's own.
        instances: objects of kvconnect's classes, the store's too, but for those that were there
            when vLLM had started: it hides them from the garbage collector.
        stored: bytes of the store's directory.
        saved: bytes, so far.
    """

    descriptors: int
    threads: int
    entries: int
    instances: dict[str, int]
    stored: int
    saved: int


def main() -> None:
    """Answer the job's number of requests, in turns."""
    job = json.load(sys.stdin)
    directory = Path(job["directory"])
    rng = random.Random(5)
    looks: list[Look] = []
    with engine(Path(job["model"]), job["transfer"], num_gpu_blocks_override=300) as made:
        for _ in range(LOOKS):
            for _ in range(job["requests"] // (LOOKS * AT_ONCE)):
                made.answer(
                    [
                        prompts_of(rng.randrange(1, 150), seed=rng.randrange(400))[0]
                        for _ in range(AT_ONCE)
                    ],
                    2,
                )
                made.check_empty()
            looks.append(look(made, directory))
    print(json.dumps([asdict(one) for one in looks]), flush=True)


def look(made: Engine, directory: Path) -> Look:
    """When all that was computed is saved."""
    made.flush()
    halves: list[Any] = [made.connector._scheduler, made.worker._worker]
    block_nbytes = made.connector._groups[0].layout.block_nbytes
    saved = int(metrics.snapshot()["store.save.saved"]) * block_nbytes
    made.forget_device()
    instances = instances_at_rest()
    return Look(
        descriptors=descriptors(),
        threads=len(list(Path("/proc/self/task").iterdir())),
        entries=entries(halves),
        instances=instances,
        stored=sum(one.stat().st_size for one in directory.rglob("*") if one.is_file()),
        saved=saved,
    )


def instances_at_rest() -> dict[str, int]:
    """Objects of kvconnect's classes, by class, as soon as nothing is on its way any more."""
    until = time.monotonic() + SETTLE_S
    while True:
        gc.collect()
        found = Counter(
            f"{kind.__module__}.{kind.__qualname__}"
            for kind in map(type, gc.get_objects())
            if kind.__module__.startswith("kvconnect.")
        )
        busy = [name for name in found if name.endswith(ON_ITS_WAY)]
        if not busy or time.monotonic() > until:
            return dict(found)
        time.sleep(0.02)


def entries(roots: list[Any]) -> int:
    """Entries of all containers that `roots` reach, but for those of stores, which are bounded."""
    seen: set[int] = set()
    left = list(roots)
    found = 0
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            found += len(one)
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset | deque):
            found += len(one)
            left += one
        elif type(one).__module__.startswith("kvconnect.") and (
            ".backends" not in type(one).__module__
        ):
            names = [*getattr(one, "__dict__", ()), *getattr(type(one), "__slots__", ())]
            left += [getattr(one, name) for name in names if hasattr(one, name)]
    return found


if __name__ == "__main__":
    main()
