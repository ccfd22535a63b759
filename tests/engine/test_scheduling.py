"""Who runs when: the guarantee of blocks, the budget of tokens, the queue."""

from __future__ import annotations

import numpy as np
import pytest
from observed import request_of, tokens, watch_batches

from kvconnect import SamplingParams
from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.engine.request.live_request import LiveRequest
from kvconnect.engine.scheduler import Scheduler
from kvconnect.errors import ConfigurationError

SHORT = SamplingParams(max_tokens=20)


def test_a_prompt_is_computed_in_chunks_of_the_budget(open_llm, llama):
    llm = open_llm(llama, max_num_tokens=128)
    batches = watch_batches(llm)
    llm.generate([7] * 300, SamplingParams(max_tokens=2, ignore_eos=True))
    assert batches == [[(0, 128)], [(0, 128)], [(0, 44)], [(0, 1)]]


def test_chunks_fill_what_running_requests_leave(open_llm, llama):
    llm = open_llm(llama, max_num_tokens=50)
    batches = watch_batches(llm)
    llm.generate([[1] * 40, [2] * 40, [3] * 5], SamplingParams(max_tokens=3, ignore_eos=True))
    assert batches[:3] == [
        [(0, 40), (1, 10)],  # the third would get nothing: it is not admitted
        [(1, 30), (2, 5), (0, 1)],
        [(0, 1), (1, 1), (2, 1)],
    ]


def test_the_budget_is_never_exceeded_and_nobody_starves(open_llm, llama, prompts):
    llm = open_llm(llama, max_num_tokens=5)
    batches = watch_batches(llm)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
    assert all(sum(count for _, count in batch) <= 5 for batch in batches)
    assert all(count >= 1 for batch in batches for _, count in batch)
    assert {len(output.output_token_ids) for output in outputs} == {6}


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_prompts_that_are_not_to_be_divided_are_computed_in_one_step(
    open_llm, llama, reference, policy
):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, count).tolist() for count in (40, 40, 5, 50, 1, 9, 33)]
    # Nor where others begin alike.
    prompts += [prompts[0][:32] + [7] * 9, prompts[0][:32] + [8] * 3]
    llm = open_llm(llama, max_num_tokens=50, enable_chunked_prefill=False, scheduling=policy)
    batches = watch_batches(llm)
    outputs = llm.generate(prompts, SHORT)
    assert tokens(outputs) == reference(llama, prompts, 20)
    assert all(sum(count for _, count in batch) <= 50 for batch in batches)
    steps = [dict(batch) for batch in batches]
    for at, output in enumerate(outputs):
        first = next(step[at] for step in steps if at in step)
        assert first == output.prompt_tokens - output.reused_device_tokens
    with pytest.raises(ConfigurationError, match=r"prompt: 51 tokens, and max_num_tokens=50"):
        llm.generate([1] * 51, SHORT)


def test_prompts_whose_loads_failed_are_not_divided_either():
    scheduler = Scheduler(NoLimits(), max_num_tokens=10, max_batch_size=8, divide_prompts=False)
    requests = [request_of([number] * 8, number=number, tokens_per_block=4) for number in range(4)]
    for request in requests[:3]:
        scheduler.loading[request.request_id] = request
        scheduler.resume(request)
    requests[1].num_computed_tokens = 6
    scheduler.waiting.append(requests[3])
    batch = scheduler.schedule()
    assert [one.request_id for one in batch.context_requests] == [0, 1]
    assert [one.num_scheduled_tokens for one in batch.context_requests] == [8, 2]
    assert list(scheduler.waiting) == [requests[3]]  # it must not pass the one that waits
    # What is longer than a whole step is divided: otherwise it would wait for ever.
    longer = request_of([9] * 30, number=9, tokens_per_block=4)
    scheduler.running[:] = [longer]
    assert scheduler.schedule().context_requests == [longer]
    assert longer.num_scheduled_tokens == 10


def test_first_come_first_served(open_llm, llama):
    llm = open_llm(llama, max_batch_size=1)
    batches = watch_batches(llm)
    llm.generate([[1] * 9, [2] * 9, [3] * 9], SamplingParams(max_tokens=2, ignore_eos=True))
    assert [batch[0][0] for batch in batches] == [0, 0, 1, 1, 2, 2]


def test_requests_queue_when_the_cache_is_full(open_llm, llama, reference, prompts):
    # Eight blocks: the longest prompt with its answer needs all of them.
    llm = open_llm(llama, max_tokens=128)
    outputs = llm.generate(prompts * 3, SHORT)
    got = tokens(outputs)
    assert got == reference(llama, prompts * 3, 20)
    assert llm.stats().preemptions == 0


def test_a_request_is_admitted_only_if_all_can_run_to_their_end(open_llm, llama):
    llm = open_llm(llama, max_tokens=96)  # six blocks
    batches = watch_batches(llm)
    # Each holds one block at first and four at its end.
    llm.generate([[1] * 10, [2] * 10], SamplingParams(max_tokens=50, ignore_eos=True))
    assert all(len(batch) == 1 for batch in batches)


def test_equal_long_prompts_at_once_are_not_all_computed(open_llm, llama):
    llm = open_llm(llama, max_num_tokens=64)
    outputs = llm.generate([[9, 8, 7] * 40] * 6, SamplingParams(max_tokens=2))
    # The second may be admitted while the end of the first is still being computed.
    assert sum(output.computed_tokens for output in outputs) < 2 * 120


def test_what_can_never_fit_is_refused(open_llm, llama):
    llm = open_llm(llama, max_tokens=64)
    llm.generate([5] * 60, SamplingParams(max_tokens=5))  # 64 slots: the last token takes none
    with pytest.raises(ConfigurationError, match=r"prompt: 60 tokens with max_tokens=6 need 5 KV"):
        llm.generate([5] * 60, SamplingParams(max_tokens=6))


def test_blocks_are_counted_as_free_before_the_result_is_told(open_llm, llama, monkeypatch):
    llm, seen = open_llm(llama), []
    finish = LiveRequest.finish

    def noting(live, reason):
        stats = llm.stats()
        seen.append((stats.free_blocks, stats.max_blocks))
        finish(live, reason)

    monkeypatch.setattr(LiveRequest, "finish", noting)
    llm.generate([1, 2, 3], SHORT)
    assert seen == [(64, 64)]


def test_an_idle_engine_sleeps(open_llm, llama):
    llm = open_llm(llama)
    llm.generate([1, 2, 3], SHORT)
    steps: list[bool] = []
    step = llm._engine.step
    llm._engine.step = lambda: steps.append(True) or step()
    llm._thread._inbox.ring()
    llm.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    # Two forward passes, and a look around after each ring of the bell: no polling.
    assert len(steps) <= 2 + 3


def test_long_prompts_that_resume_together_all_get_tokens():
    """As many as were loading when their store failed."""
    scheduler = Scheduler(NoLimits(), max_num_tokens=8, max_batch_size=4)
    for request_id in range(4):
        request = request_of([request_id] * 20, number=request_id)
        scheduler.loading[request_id] = request
        scheduler.resume(request)
    batch = scheduler.schedule()
    assert [request.num_scheduled_tokens for request in batch.requests] == [5, 1, 1, 1]


class NoLimits(BaseKVCacheManager):
    """A cache manager that has room for everything."""

    def prepare_resources(self, batch):
        pass

    update_resources = free_resources = prepare_resources

    def get_needed_resource_to_completion(self, request):
        return 0

    get_batch_cache_indices = get_buffers = get_needed_resource_to_completion

    def get_max_resource_count(self):
        return 100

    get_num_free_blocks = get_max_resource_count
