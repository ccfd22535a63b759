"""Many requests of every end: nothing is kept of one that ended."""

from __future__ import annotations

import gc
import random
import threading
from collections import deque
from typing import Any

import psutil
from vllm_stand_in import Open, StandIn, T

from kvconnect.trace import metrics

CAPACITY = 1 << 20
"""Of the store: less than what is saved."""


def serve(engine: StandIn, chance: random.Random, turns: int) -> None:
    for _ in range(turns):
        for _ in range(10):
            prompt = [chance.randrange(3, 90) for _ in range(chance.randrange(1, 9 * T))]
            salt = chance.choice((None, None, str(chance.random())))
            request = engine.submit(prompt, cache_salt=salt, wanted=len(prompt) + 3)
            engine.step()
            if request.state == "running" and chance.random() < 0.2:
                engine.preempt(request)
            if chance.random() < 0.2 and request.request_id in engine.requests:
                engine.abort(request)
        engine.run()
        engine.flush()
        engine.check_empty()


def held(engine: StandIn) -> tuple[int, int, int]:
    """Entries of all containers that the two halves reach, descriptors, and threads."""
    gc.collect()
    found = entries([engine.scheduler, engine.worker])
    return found, psutil.Process().num_fds(), threading.active_count()


def entries(roots: list[Any]) -> int:
    """Entries of all containers that `roots` reach, but for those of stores, which are bounded."""
    seen: set[int] = set()
    found, left = 0, list(roots)
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
        elif (module := type(one).__module__).startswith(
            "kvconnect."
        ) and ".backends" not in module:
            names = [*getattr(one, "__dict__", ()), *getattr(type(one), "__slots__", ())]
            left += [getattr(one, name) for name in names if hasattr(one, name)]
    return found


def test_nothing_grows_with_the_number_of_requests(open_engine: Open, tmp_path):
    url = f"disk://{tmp_path}/store?capacity={CAPACITY}"
    engine = open_engine(url=url, num_blocks=80, chunk=7, save_on="finish")
    chance = random.Random(5)
    saved = metrics.snapshot().get("store.save.saved", 0)
    serve(engine, chance, 8)
    before = held(engine)
    serve(engine, chance, 8)
    after = held(engine)
    assert after[0] < before[0] + 40  # half an entry for each request: some are on their way
    assert after[1] <= before[1], "descriptors"
    assert after[2] <= before[2], "threads"
    assert metrics.snapshot()["store.save.saved"] - saved > CAPACITY // 8192
    assert sum(one.stat().st_size for one in tmp_path.rglob("*") if one.is_file()) <= 2 * CAPACITY
