"""SGLang's own cache controller, its threads and host pools, over stores that fail."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed here: make test-engines")

from faulty_store import STORES
from real_controller import Server
from sglang_pools import PAGE

from kvconnect.testing.faults.faulty_backend import BACKEND_FAULTS

pytestmark = pytest.mark.usefixtures("one_rank")

PROMPT = list(range(1, 10 * PAGE + 1))
"""Ten pages."""
POOLS = [(False, "page_head"), (True, "layer_first")]
"""Whether a pool holds latents, and its layout."""


@pytest.fixture(scope="module", params=POOLS, ids=lambda one: f"{'mla' * one[0]}{one[1]}")
def server(request, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """On a faulty store."""
    is_mla, layout = request.param
    made = Server(model, f"faulty://{tmp_path_factory.mktemp('store')}", layout, is_mla=is_mla)
    yield made
    made.close()


@pytest.fixture
def healthy(server: Server) -> Server:
    """The same, once its store is used again after the fault before."""
    heal(server)
    return server


def heal(server: Server) -> None:
    """Until lookups are waited for again, and no call is refused."""
    access = server.controller.storage_backend._access
    server.store.io.call_soon(STORES[""].heal)
    until = time.monotonic() + 60
    while not server.store.backend.available or access._budget.suspended:
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("fault", [one for one in BACKEND_FAULTS if one != "none"])
def test_what_is_prefetched_from_a_failing_store_is_what_was_backed_up(healthy, fault):
    server, store = healthy, STORES[""]
    tokens = [*PROMPT, *[BACKEND_FAULTS.index(fault) + 1] * PAGE]
    written = server.back_up(tokens)
    server.flush()
    assert all(map(torch.equal, got := server.prefetch(tokens), written))
    assert len(got) == len(written)
    for operations in ({"lookup", "load", "save"}, {"load"}, {"lookup"}):
        store._operations = frozenset(operations)
        hits = store.hits
        server.store.io.call_soon(lambda: store.set(fault))
        until = time.monotonic() + 60
        while store.hits < hits + 2:  # calls of the fault before, which end now, open the breaker
            assert time.monotonic() < until
            got = server.prefetch(tokens)
            assert len(got) <= len(written)
            assert all(map(torch.equal, got, written))
            server.back_up(tokens)  # damaged pages are dropped from the store
        heal(server)
        server.check_alive()
    until = time.monotonic() + 60
    while len(again := server.prefetch(tokens)) < len(written):
        # The breaker closes with the first call that succeeds; what was damaged is written anew.
        assert time.monotonic() < until
        server.back_up(tokens)
    assert all(map(torch.equal, again, written))
    server.check_alive()


@pytest.mark.planted("paused", "sglang", "hit")
def test_a_flush_of_sglang_s_cache_keeps_what_is_stored(healthy):
    server = healthy
    written = server.back_up([*PROMPT, *[77] * PAGE])
    server.flush()
    server.controller.reset()
    got = server.prefetch([*PROMPT, *[77] * PAGE])
    assert len(got) == len(written)
    assert all(map(torch.equal, got, written))
    server.check_alive()


def test_prompts_of_several_batches(healthy):
    """SGLang asks for 128 pages at a time."""
    server = healthy
    tokens = list(range(1000, 1000 + 280 * PAGE))
    written = server.back_up(tokens)
    server.flush()
    got = server.prefetch([*tokens, *range(8 * PAGE)])
    assert len(got) == 280
    assert all(map(torch.equal, got, written))
    server.check_alive()
