"""Loads in the step: layer by layer, no layer waits for the next one."""

from __future__ import annotations

import threading
import time
from typing import ClassVar

import pytest
import torch
from bench_engine import LAYERS, LAYOUT, BenchEngine, T, llm_args, reference
from stores import DictStore

from kvconnect import frame
from kvconnect.connector.offload.staging import PoolCopier, clear_beyond
from kvconnect.connector.offload.worker import OffloadWorker
from kvconnect.layout import KvCacheLayout

PROMPT = list(range(1, 6 * T + 3))  # six blocks and two tokens, of which one is loaded
PATIENT = {"lookup_timeout_ms": 60_000}  # each of these is about a load, however busy the machine
SLOT = frame.frame_nbytes(LAYOUT.block_nbytes)


class RecordingCopier(PoolCopier):
    """Holds each layer's copies until a test lets them go."""

    calls: ClassVar[list[range | None]] = []
    poison: ClassVar[bool] = False  # copies from now on would do harm
    allowed: ClassVar[list[threading.Event]] = []

    def copy_in(self, slots, block_ids, layers=None):
        if layers is not None:
            assert self.allowed[layers.start].wait(60)
        self.calls.extend([layers] * len(slots))
        if self.poison:
            for slot in slots:
                slot.payload.view(LAYOUT.dtype).fill_(666.0)
        super().copy_in(slots, block_ids, layers)


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> type[RecordingCopier]:
    monkeypatch.setattr(RecordingCopier, "calls", [])
    monkeypatch.setattr(RecordingCopier, "allowed", [threading.Event() for _ in range(LAYERS)])
    monkeypatch.setattr(OffloadWorker, "copier_class", RecordingCopier)
    return RecordingCopier


def filled() -> DictStore:
    store = DictStore(inline=True)
    with BenchEngine(llm_args(store)) as bench:
        bench.answer(PROMPT, 1)
    return store


def test_waiting_for_a_layer_returns_while_the_next_is_pending(
    copier: type[RecordingCopier],
) -> None:
    with BenchEngine(llm_args(filled(), **PATIENT)) as bench:
        request = bench.submit(PROMPT, 1)
        batch = bench.schedule()
        bench.manager.begin_step(batch)
        for layer in range(LAYERS):
            copier.allowed[layer].set()
            bench.manager.wait_for_layer_load(layer)
            ready = bench.manager._worker._step_load._ready
            assert [one.is_set() for one in ready] == [i <= layer for i in range(LAYERS)]
            bench.write(request, layer)
        bench.manager.end_forward()
        assert bench.manager.end_step().failed == {}
        assert bench.token(request) == reference(PROMPT, 1)[0]
    # Every layer of all blocks before the next layer of any.
    starts = [layers.start for layers in copier.calls]
    assert starts == sorted(starts)
    assert len(starts) == LAYERS * 7


def test_without_layerwise_whole_blocks_are_copied(copier: type[RecordingCopier]) -> None:
    with BenchEngine(llm_args(filled(), **PATIENT, layerwise=False)) as bench:
        assert bench.answer(PROMPT, 1) == reference(PROMPT, 1)
    assert copier.calls == [None] * 7


def test_what_does_not_fit_the_staging_memory_goes_first_and_whole(
    copier: type[RecordingCopier],
) -> None:
    for event in copier.allowed:
        event.set()
    with BenchEngine(llm_args(filled(), **PATIENT, staging_bytes=3 * SLOT)) as bench:
        assert bench.answer(PROMPT, 1) == reference(PROMPT, 1)
    assert copier.calls[:6] == [None] * 6
    assert copier.calls[6:] == [range(layer, layer + 1) for layer in range(LAYERS)]


def test_copies_that_hang_fail_the_load_and_write_nothing_afterwards(
    copier: type[RecordingCopier], monkeypatch: pytest.MonkeyPatch
) -> None:
    copier.allowed[0].set()  # layer 1 never comes
    with BenchEngine(llm_args(filled(), **PATIENT, load_timeout_s=0.2)) as bench:
        request = bench.submit(PROMPT, 1)
        blocked = threading.Timer(0.5, copier.allowed[1].set)
        blocked.start()
        started = time.monotonic()
        bench.step()
        assert time.monotonic() - started < 30  # no more than the copy that was running
        assert bench.outcomes[-1].failed == {request.request_id: 0}
        blocked.join()
        monkeypatch.setattr(copier, "poison", True)
        copier.allowed[2].set()
        bench.run()
        staging = bench.manager._worker._staging
        deadline = time.monotonic() + 60
        while staging.num_free < staging.num_slots:
            assert time.monotonic() < deadline
        assert not (bench.kv.pool == 666.0).any()
        assert request.tokens.view[-1] == reference(PROMPT, 1)[0]


@pytest.mark.parametrize(
    "layout",
    [KvCacheLayout(2, 2, 3, 3, 4, torch.float32), KvCacheLayout(2, 2, 5, 3, 4, torch.float64),
     KvCacheLayout(3, 1, 4, 0, 8, torch.bfloat16)],
)  # fmt: skip
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_clearing_spares_the_tokens_that_count(layout: KvCacheLayout, num_tokens: int) -> None:
    payload = torch.full((layout.block_nbytes,), 1, dtype=torch.uint8)
    clear_beyond(payload, layout, num_tokens)
    kept = layout.token_nbytes * num_tokens
    assert int(payload.sum()) == kept
    planes = payload.view(layout.dtype).view(layout.num_layers * layout.kv_factor, -1)
    if layout.value_dim in (0, layout.key_dim):
        assert (planes[:, : planes.shape[1] * num_tokens // layout.tokens_per_block] != 0).all()
    else:
        keys = planes[:, : layout.tokens_per_block * layout.num_kv_heads * layout.key_dim]
        values = planes[:, keys.shape[1] :]
        for part in (keys, values):
            assert (part[:, : part.shape[1] * num_tokens // layout.tokens_per_block] != 0).all()
