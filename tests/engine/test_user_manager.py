"""A cache manager of the user's own: blocks from a list, nothing is ever reused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from observed import tokens
from torch import Tensor

from kvconnect import KvCacheConfig, SamplingParams
from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.errors import ConfigurationError, EngineClosed
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest, RequestState, ScheduledBatch

GREEDY = SamplingParams(max_tokens=20)


class NaiveManager(BaseKVCacheManager):
    def __init__(
        self, config: KvCacheConfig, layouts: Sequence[KvCacheLayout], device: torch.device
    ) -> None:
        (self.layout,) = layouts
        self.size = config.tokens_per_block
        self.count = -(-(config.max_tokens or 4096) // self.size)
        shape = self.layout.flat_shape(self.count)
        # Nothing is promised about memory that was never written: this is as bad as it can be.
        self.pool = torch.full(shape, torch.nan, dtype=self.layout.dtype, device=device)
        self.free = list(range(self.count))
        self.held: dict[int, list[int]] = {}
        self.prepared = 0

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        self.prepared += 1
        for request in batch.context_requests:
            if request.state is RequestState.QUEUED:
                self.held[request.request_id] = []
                request.state = RequestState.CONTEXT
                request.num_computed_tokens = 0
        for request in batch.requests:
            held = self.held[request.request_id]
            while len(held) * self.size < request.num_tokens:
                held.append(self.free.pop())

    def update_resources(self, batch: ScheduledBatch) -> None:
        pass

    def free_resources(self, request: LlmRequest) -> None:
        self.free += self.held.pop(request.request_id)

    def get_max_resource_count(self) -> int:
        return self.count

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        longest = request.prompt_len + request.sampling_params.max_tokens - 1
        return -(-longest // self.size) - len(self.held.get(request.request_id, ()))

    def get_batch_cache_indices(self, requests: Sequence[LlmRequest]) -> Mapping[int, list[int]]:
        return {request.request_id: self.held[request.request_id] for request in requests}

    def get_buffers(self, layer_idx: int) -> Tensor | tuple[Tensor, Tensor]:
        layout, layer = self.layout, self.pool[:, layer_idx]
        inner = (self.size, layout.num_kv_heads)
        if layout.kv_factor == 2:
            return layer.view(self.count, 2, *inner, layout.key_dim)
        keys = self.size * layout.num_kv_heads * layout.key_dim
        return (
            layer[:, 0, :keys].unflatten(1, (*inner, layout.key_dim)),
            layer[:, 0, keys:].unflatten(1, (*inner, layout.value_dim)),
        )

    def get_num_free_blocks(self) -> int:
        return len(self.free)


@pytest.fixture
def made():
    return []


@pytest.fixture
def factory(made):
    def make(config, layouts, device):
        made.append(NaiveManager(config, layouts, device))
        return made[-1]

    return make


@pytest.mark.parametrize("arch", ["gemma3", "deepseek_v3"])
def test_it_serves_the_engine(arch, model_of, open_llm, reference, prompts, factory, made):
    llm = open_llm(model_of(arch), kv_cache_manager=factory, max_tokens=160, max_num_tokens=48)
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY)
        got = tokens(outputs)
        assert got == reference(model_of(arch), prompts, 20)
    assert {output.reused_device_tokens for output in outputs} == {0}
    assert len(made[0].free) == made[0].count
    assert made[0].held == {}


def test_it_is_asked_once_a_step(llama, open_llm, factory, made):
    llm = open_llm(llama, kv_cache_manager=factory)
    llm.generate([[1] * 9, [2] * 9], SamplingParams(max_tokens=5, ignore_eos=True))
    assert made[0].prepared == llm.stats().steps == 5


def test_engine_and_connector_ask_it_for_the_same_blocks(llama, open_llm):
    asked = []

    class Asked(KVCacheManager):
        def get_batch_cache_indices(self, requests):
            asked.append(len(requests))
            return super().get_batch_cache_indices(requests)

    llm = open_llm(llama, kv_cache_manager=Asked)
    llm.generate([[1] * 9, [2] * 9], SamplingParams(max_tokens=5, ignore_eos=True))
    assert asked == [2] * llm.stats().steps


class Choosy(NaiveManager):
    """Raises for requests whose prompt begins with a 13: late, when others were admitted."""

    late = True

    def prepare_resources(self, batch):
        if not self.late:
            self._choose(batch)
        super().prepare_resources(batch)
        self._choose(batch)

    def _choose(self, batch):
        for request in batch.context_requests:
            if request.tokens.view[0] == 13 and request.num_generated_tokens == 0:
                raise RuntimeError(f"not {request.prompt_len} tokens of this kind")


class Undecided(NaiveManager):
    def get_needed_resource_to_completion(self, request):
        if request.tokens.view[0] == 13:
            raise RuntimeError("not so many tokens of this kind")
        return super().get_needed_resource_to_completion(request)


class Early(Choosy):
    late = False


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("kind", [Choosy, Early, Undecided])
def test_what_it_raises_for_one_request_ends_that_request(
    llama, open_llm, reference, prompts, kind, policy
):
    expected = reference(llama, prompts[:3], 5)
    llm = open_llm(llama, kv_cache_manager=kind, scheduling=policy)
    params = SamplingParams(max_tokens=5)
    several = [*prompts[:2], [13] * 40, prompts[2]]
    for _ in range(2):
        handles = [llm.submit(prompt, params) for prompt in several]
        with pytest.raises(RuntimeError, match="tokens of this kind"):
            handles.pop(2).result(60)
        assert [list(one.result(60).output_token_ids) for one in handles] == expected
    manager = llm._engine._kv
    assert len(manager.free) == manager.count
    assert manager.held == {}
    stats = llm.stats()
    assert (stats.waiting_requests, stats.running_requests) == (0, 0)


def test_one_that_says_that_others_are_concerned_ends_the_engine(llama, open_llm, prompts):
    class Fragile(Choosy):
        raises_for_requests = False

    llm = open_llm(llama, kv_cache_manager=Fragile)
    with pytest.raises(RuntimeError, match="tokens of this kind"):
        llm.generate([13] * 40, SamplingParams(max_tokens=5))
    with pytest.raises(EngineClosed):
        llm.generate(prompts[0], SamplingParams(max_tokens=5))


def test_it_is_refused_with_a_connector_if_it_serves_none(llama, open_llm, factory):
    with pytest.raises(ConfigurationError, match="NaiveManager does not support connectors"):
        open_llm(llama, kv_cache_manager=factory, connector="memory:")


def test_one_without_padding_requests_says_so(llama, open_llm, factory, made):
    open_llm(llama, kv_cache_manager=factory)
    with pytest.raises(ConfigurationError, match=r"NaiveManager.*override add_padding_request"):
        made[0].add_padding_request(1)


def test_memory_of_another_shape_is_refused(llama, open_llm):
    class Wrong(NaiveManager):
        def get_buffers(self, layer_idx):
            return super().get_buffers(layer_idx).transpose(2, 3)

    with pytest.raises(ConfigurationError, match=r"get_buffers: keys are .* is needed"):
        open_llm(llama, kv_cache_manager=Wrong)


def test_one_that_loses_blocks_fails_requests_instead_of_hanging(llama, open_llm):
    class Leaky(NaiveManager):
        def free_resources(self, request):
            del self.held[request.request_id]

    llm = open_llm(llama, kv_cache_manager=Leaky, max_tokens=64)
    llm.generate([1] * 40, GREEDY)
    with pytest.raises(Exception, match="needs 4 KV blocks; 0 are free though no other request"):
        llm.generate([1] * 40, GREEDY)
