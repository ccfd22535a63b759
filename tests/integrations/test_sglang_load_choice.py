"""In SGLang pages are computed if their load would take longer, by the server's own batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from load_clock import SLOW, Decisions, LoadClock, at_two_speeds
from sglang_pools import PAGE, StandInPool, fill, hashes, indices, storage_config
from sglang_server import serving

from kvconnect.integrations.sglang import KvConnectStorage
from kvconnect.integrations.sglang.steps import steps

PAGES = 5


def batch(*lengths: int, prefixes: tuple[int, ...] = (), decodes: bool = False) -> Any:
    """SGLang's ``ScheduleBatch``."""
    mode = SimpleNamespace(is_decode=lambda: decodes)
    starts = list(prefixes or [0] * len(lengths))
    return SimpleNamespace(
        forward_mode=mode,
        reqs=list(lengths),
        extend_lens=list(lengths),
        prefix_lens=starts,
        seq_lens_sum=sum(lengths) + sum(starts),
    )


class Server:
    """A server at work, without overlap of its batches."""

    def __init__(self, server: Any, storage: KvConnectStorage, clock: LoadClock) -> None:
        self.storage, self.clock = storage, clock
        self._server = server
        clock.set_in(storage._choice)
        access = storage._access
        access.load = clock.times(access.load, lambda keys, _: len(keys) * PAGE)

    def compute(self, tokens: int) -> None:
        scheduler, one = self._server.scheduler, batch(tokens)
        result = scheduler.run_batch(one)
        assert result == "results of 1"
        self.clock.computes(tokens)
        scheduler.process_batch_result(one, result)
        self.clock.now += 60.0

    def save(self, seed: str) -> None:
        assert all(self.storage.batch_set_v1(hashes(PAGES, seed), indices(range(PAGES))))
        assert self.storage._access.flush(60)

    def ask(self, seed: str, prefix: int = 0) -> int:
        """Pages of a prompt that were loaded."""
        names = hashes(PAGES, seed)
        more = SimpleNamespace(prefix_keys=names[:prefix])
        found = self.storage.batch_exists(names[prefix:], more)
        if found:
            assert all(self.storage.batch_get_v1(names[:found], indices(range(found))))
        return found


@pytest.fixture
def start(tiny, tmp_path, clock: LoadClock) -> Iterator[Callable[..., Server]]:
    with ExitStack() as undo:

        def make(own: dict[str, Any] | None = None, **settings: Any) -> Server:
            given = {"disable_overlap_schedule": True, "chunked_prefill_size": 512} | settings
            server = undo.enter_context(serving(tiny, **given))
            url = f"disk://{tmp_path}/kv?capacity=64MiB"
            config = storage_config(tiny, url, **({"load_decisions": True} | (own or {})))
            storage = server.start(lambda: KvConnectStorage(config, {}))
            undo.callback(storage.close)
            pool = StandInPool("page_first")
            fill(pool)
            storage.register_mem_pool_host(pool)
            made = Server(server, storage, clock)
            for tokens in (200, 1, 50, 200, 1):
                made.compute(tokens)
            for seed in "abcd":
                made.save(seed)
            return made

        yield make


@at_two_speeds
def test_a_store_is_asked_while_it_is_faster(start, clock, token_s, asked, decided):
    clock.token_s = token_s
    server, seen = start(), Decisions()
    assert [server.ask(one) for one in "abcd"] == [PAGES * one for one in asked]
    assert seen() == decided
    assert server.storage.exists(hashes(1, "b")[0])  # whatever is chosen


@pytest.mark.parametrize(
    ("own", "settings"),
    [
        ({"load_decisions": False}, {}),
        ({}, {"hicache_storage_prefetch_policy": "best_effort"}),
    ],
)
def test_where_it_is_off_or_no_request_waits_a_slow_store_is_asked(start, clock, own, settings):
    clock.token_s = SLOW
    server = start(own, **settings)
    assert [server.ask(one) for one in "abcd"] == [PAGES] * 4


def test_without_hooks_a_slow_store_is_asked(start, clock):
    clock.token_s = SLOW
    server = start({"model_revision": "org/name@1"}, hooks=False)
    assert [server.ask(one) for one in "abcd"] == [PAGES] * 4


def test_batches_are_reported_with_their_contexts(start, monkeypatch):
    server = start()
    seen: list[tuple[int, float]] = []
    monkeypatch.setattr(server.storage._choice, "begin_step", lambda *step: seen.append(step))
    scheduler = server._server.scheduler
    scheduler.run_batch(batch(100, 20, prefixes=(0, 64)))
    scheduler.run_batch(batch(30, 40, decodes=True))
    scheduler.run_batch(SimpleNamespace(reqs=[1]))  # another kind, which is not understood
    assert seen == [(120, 100 * 50.0 + 20 * 74.0), (2, 70.0), (0, 0.0)]
    server.storage.close()
    scheduler.run_batch(batch(100))
    assert len(seen) == 3
    assert steps.choice is None
