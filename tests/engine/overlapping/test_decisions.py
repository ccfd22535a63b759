"""What is computed beside a load, by the measured pace of both: the rules, without an engine."""

from __future__ import annotations

from beside import PROMPT, T
from observed import request_of

from kvconnect.engine.beside_loads import BesideLoads
from kvconnect.pace import LoadPace
from kvconnect.request import ExternalMatch, LlmRequest, ScheduledBatch
from kvconnect.trace import metrics

END = 12 * T


def prompt(number: int = 1, *, loads: bool = False) -> LlmRequest:
    request = request_of(PROMPT, number=number, tokens_per_block=T)
    if loads:
        request.load_end = request.loaded_from = END
    return request


def measured(max_num_tokens: int, step_s: float, *, stepped: bool = False) -> BesideLoads:
    """Knows steps that take `step_s` for each token, and loads of five seconds for each block."""
    paces = BesideLoads(max_num_tokens, lambda: (1, 0), stepped=stepped)
    for size in (T, 100, 1 << 10):
        paces._steps.record(size, size * size / 2, 0.001 + size * step_s)
    paces._loads.record((T, 5.0), (100 * T, 500.0), piece=T, gap_s=5.0, total=100 * T)
    return paces


def test_the_progress_of_a_cancelled_load_is_not_that_of_the_next() -> None:
    request = prompt(loads=True)
    request.load_times = [(2 * T, 0.5)]  # came while the request waited to be admitted again
    labels = (("decision", "compute"),)
    before = metrics.by_labels().get(labels, {}).get("engine.load", 0)
    beside = BesideLoads(64, lambda: (1, 0))
    beside.add_chunk(ScheduledBatch(), [request])
    request.num_computed_tokens = T
    beside.end(request)
    assert metrics.by_labels()[labels]["engine.load"] == before + 1


def test_a_first_token_does_not_wait_for_what_is_computed_beside_a_load(monkeypatch):
    first, second = prompt(0), prompt(1, loads=True)
    paces = BesideLoads(1 << 10, lambda: (2, 0))
    monkeypatch.setattr(paces, "chunk", lambda _, budget, **__: min(T, budget))
    paces.add_chunk(ScheduledBatch(), [second])
    steps = []
    for scheduled in (len(PROMPT), 1, T, 1, 1):
        first.num_computed_tokens = len(PROMPT) - max(scheduled, T + 1 if scheduled == T else 1)
        first.num_scheduled_tokens = scheduled
        batch = ScheduledBatch([first])
        paces.add_chunk(batch, [second])
        steps.append(second in batch.context_requests)
    # The third does not end the prompt; every second one that does has a chunk beside it.
    assert steps == [False, True, True, False, True]


def test_a_load_that_explores_is_not_ended_before_its_first_byte():
    """A store that became fast is measured beside the first step, and loads from then on."""
    paces = measured(1 << 10, 1e-3)
    match = ExternalMatch(0, END, is_async=True, overlaps=True)
    requests = [prompt(number) for number in range(1, 5)]
    assert [paces.is_worth(one, match) for one in requests] == [False, False, False, True]
    request = requests[-1]
    request.load_end = request.loaded_from = END
    assert not paces.add_chunk(ScheduledBatch(), [request])
    batch = ScheduledBatch()
    assert not paces.add_chunk(batch, [request])
    assert (batch.requests, request.num_scheduled_tokens) == ([request], 11 * T)
    request.num_computed_tokens = 11 * T
    request.load_times = [(11 * T, 0.001), (6 * T, 0.003), (0, 0.005)]
    paces.end(request)
    assert paces.is_worth(request, match)


def test_a_load_is_alone_if_nothing_would_be_computed_beside_it():
    paces = measured(1 << 10, 1e-3)
    match = ExternalMatch(0, END, is_async=True, overlaps=True)
    request = prompt()
    for num_prompts, num_running, block_s, alone in (
        *((1, 1, 1e-4, True), (1, 1, 0.005, True), (1, 1, 5.0, False)),
        *((1, 0, 1e-4, True), (1, 0, 0.005, False), (4, 0, 0.005, True)),
    ):
        paces._num_requests = lambda counts=(num_prompts, num_running): counts
        paces._loads = LoadPace()
        paces._loads.record((T, 0.0), (9 * T, 8 * block_s), piece=T, gap_s=0.0, total=9 * T)
        paces.is_worth(request, match)
        assert request.loads_alone is alone


def test_mixers_that_step_compute_all_at_once_or_nothing():
    def scheduled(max_num_tokens: int, computed: int) -> int:
        paces = measured(max_num_tokens, 1e-6, stepped=True)
        request = prompt(loads=True)
        request.num_computed_tokens = computed
        batch = ScheduledBatch()
        for _ in range(2):
            paces.add_chunk(batch, [request])
        return sum(one.num_scheduled_tokens for one in batch.requests)

    assert scheduled(1 << 10, 0) == len(PROMPT)
    assert scheduled(END - 1, 0) == 0
    assert scheduled(1 << 10, T) == 0
