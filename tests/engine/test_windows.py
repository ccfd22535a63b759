"""Layers that look back only so far have pools of their own; nothing behind a window is read.

The cache manager here is as simple as can be, and spiteful: it overwrites blocks with NaN before
they are used and once no window reaches them, so that any use of them shows in the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvconnect import KvCacheConfig, SamplingParams
from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.cache.memory.pool_tensor import allocate_pool, layer_buffers
from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.engine.model.pool_groups import effective_windows, group_layouts
from kvconnect.engine.model.seam import LayerShape
from kvconnect.engine.model.sequence_step import first_scheduled_token
from kvconnect.engine.sampling.drafts import NgramSpeculation
from kvconnect.errors import UnsupportedModel, UsageError
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest, RequestState, ScheduledBatch

GREEDY = SamplingParams(max_tokens=28)
MADE: list[WindowManager] = []


class Group:
    """One pool: its memory, free blocks, and each request's table."""

    def __init__(self, layout: KvCacheLayout, count: int, device: torch.device) -> None:
        self.layout = layout
        self.memory = allocate_pool(layout, count, device).fill_(torch.nan)
        self.free = list(range(count))
        self.tables: dict[int, list[int]] = {}
        self.most_held = 0

    def hold(self, request_id: int, num_tokens: int) -> None:
        table = self.tables.setdefault(request_id, [])
        while len(table) * self.layout.tokens_per_block < num_tokens:
            table.append(self.free.pop(0))
        self.most_held = max(self.most_held, sum(block >= 0 for block in table))

    def give_up(self, request_id: int, numbers: range) -> None:
        table = self.tables[request_id]
        for number in numbers:
            if number < len(table) and table[number] >= 0:
                self.memory[table[number]] = torch.nan
                self.free.append(table[number])
                table[number] = -1


class WindowManager(BaseKVCacheManager):
    """Blocks as the windows need them, nothing is reused."""

    supports_window_pools: ClassVar[bool] = True
    supports_connector: ClassVar[bool] = True  # it can rewind
    gives_up_too_much: ClassVar[int] = 0

    def __init__(
        self, config: KvCacheConfig, layouts: Sequence[KvCacheLayout], device: torch.device
    ) -> None:
        self.size = config.tokens_per_block
        count = -(-(config.max_tokens or 4096) // self.size)
        self.groups = [Group(layout, count, device) for layout in layouts]
        MADE.append(self)

    def expect_chunks(self, max_chunk_tokens: int) -> None:
        self.chunk = max_chunk_tokens

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        for request in batch.context_requests:
            if request.state is RequestState.QUEUED:
                request.state = RequestState.CONTEXT
                request.num_computed_tokens = 0
            end = first_scheduled_token(request) + self.chunk
            for group in self.groups:
                whole = group.layout.window is None
                group.hold(
                    request.request_id,
                    request.num_tokens if whole else min(end, request.num_tokens),
                )
        for request in batch.generation_requests:
            for group in self.groups:
                group.hold(request.request_id, request.num_tokens + len(request.draft_tokens))

    def update_resources(self, batch: ScheduledBatch) -> None:
        for request in batch.requests:
            for group in self.groups:
                if group.layout.window is not None:
                    seen = request.num_computed_tokens - group.layout.window + 1
                    behind = max(seen, 0) // self.size + self.gives_up_too_much
                    group.give_up(request.request_id, range(behind))

    def free_resources(self, request: LlmRequest) -> None:
        for group in self.groups:
            group.give_up(request.request_id, range(len(group.tables[request.request_id])))
            del group.tables[request.request_id]

    def rewind(self, request: LlmRequest, num_tokens: int) -> None:
        for group in self.groups:
            table = group.tables[request.request_id]
            keep = -(-(request.num_tokens - 1) // self.size)
            group.give_up(request.request_id, range(keep, len(table)))
            del table[keep:]

    def get_max_resource_count(self) -> int:
        return len(self.groups[0].memory)

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        longest = request.prompt_len + request.sampling_params.max_tokens - 1
        return -(-longest // self.size) - len(self.groups[0].tables.get(request.request_id, ()))

    def get_batch_cache_indices(self, requests: Sequence[LlmRequest]) -> Mapping[int, list[int]]:
        return self.get_group_cache_indices(requests, 0)

    def get_group_cache_indices(
        self, requests: Sequence[LlmRequest], group: int
    ) -> Mapping[int, list[int]]:
        return {one.request_id: self.groups[group].tables[one.request_id] for one in requests}

    def get_buffers(self, layer_idx: int) -> Tensor | tuple[Tensor, Tensor]:
        for group in self.groups:
            if layer_idx in group.layout.layer_numbers:
                place = group.layout.layer_numbers.index(layer_idx)
                return layer_buffers(group.memory, group.layout, place)
        raise AssertionError(layer_idx)

    def get_num_free_blocks(self) -> int:
        return len(self.groups[0].free)


def tokens(outputs):
    return [list(output.output_token_ids) for output in outputs]


@pytest.fixture(params=["mistral", "gemma3"])
def model(request, model_of):
    return model_of(request.param)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Gemma3 with windows of 24 in four of six layers, full attention in between."""
    from kvconnect.engine.checkpoint.random_model import make_model

    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return make_model(
        tmp_path_factory.mktemp("mixed"),
        "gemma3",
        num_layers=6,
        config_overrides={"layer_types": kinds},
    )


# ---------------------------------------------------------------- the output


@pytest.mark.parametrize(("max_num_tokens", "tokens_per_block"), [(7, 16), (33, 4), (2048, 16)])
def test_equal_to_transformers(
    model, max_num_tokens, tokens_per_block, open_llm, reference, prompts
):
    llm = open_llm(
        model,
        kv_cache_manager=WindowManager,
        max_num_tokens=max_num_tokens,
        tokens_per_block=tokens_per_block,
    )
    assert tokens(llm.generate(prompts, GREEDY)) == reference(model, prompts, 28)
    for group in MADE[-1].groups:
        assert group.tables == {}
        assert sorted(group.free) == list(range(len(group.memory)))


def test_several_layers_in_each_of_two_groups(mixed, open_llm, reference, prompts):
    llm = open_llm(mixed, kv_cache_manager=WindowManager, max_num_tokens=40)
    assert [(one.window, one.layers) for one in llm.layouts] == [(None, (2, 5)), (24, (0, 1, 3, 4))]
    assert tokens(llm.generate(prompts, GREEDY)) == reference(mixed, prompts, 28)


def test_with_drafts(mixed, open_llm, reference, prompts):
    llm = open_llm(
        mixed,
        kv_cache_manager=WindowManager,
        speculative=NgramSpeculation(num_draft_tokens=7, min_ngram_size=1),
        tokens_per_block=4,
    )
    several = [*prompts, prompts[2] * 9]
    assert tokens(llm.generate(several, GREEDY)) == reference(mixed, several, 28)
    assert llm.stats().drafted_tokens > 0


def test_a_window_layer_keeps_only_what_its_window_needs(open_llm, mixed):
    llm = open_llm(mixed, kv_cache_manager=WindowManager, max_num_tokens=16, tokens_per_block=4)
    llm.generate([[1, 2, 3] * 60], SamplingParams(max_tokens=60, ignore_eos=True))
    whole, window = MADE[-1].groups
    assert whole.most_held == -(-239 // 4)
    assert window.most_held <= (24 - 1 + 16) // 4 + 1


def test_a_page_that_was_given_up_too_early_is_an_error_not_an_answer(open_llm, mixed):
    class Hasty(WindowManager):
        gives_up_too_much = 1

    llm = open_llm(mixed, kv_cache_manager=Hasty)
    with pytest.raises(UsageError, match="the cache manager does not hold them"):
        llm.generate([[1] * 60], GREEDY)


def test_sinks_and_the_like_stay_refused(tmp_path, open_llm):
    """gpt-oss mixes windows and full attention, too, but its attention has sinks."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "gpt_oss",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="sinks"):
        open_llm(tmp_path, kv_cache_manager=WindowManager)


# ---------------------------------------------------------------- windows that are asked for


def windowed_reference(directory, prompt, max_tokens, windows):
    """Greedy decoding over the whole sequence again and again, with a mask of our own per layer."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager"
    )
    for layer, window in zip(model.model.layers, windows, strict=True):

        def masked(module, args, kwargs, window=window):
            length = kwargs["hidden_states"].shape[1]
            places = torch.arange(length)
            hidden = places > places[:, None]
            if window is not None:
                hidden |= places <= places[:, None] - window
            mask = torch.zeros(length, length, dtype=torch.float64)
            kwargs["attention_mask"] = mask.masked_fill(hidden, -torch.inf)[None, None]
            return args, kwargs

        layer.self_attn.register_forward_pre_hook(masked, with_kwargs=True)
    sequence = list(prompt)
    with torch.inference_mode():
        for _ in range(max_tokens):
            logits = model(torch.tensor([sequence]), use_cache=False).logits[0, -1]
            sequence.append(int(logits.float().argmax()))
    return sequence[len(prompt) :]


@pytest.mark.parametrize("pools", [True, False])
def test_max_attention_window_is_repeated_over_the_layers(pools, open_llm, llama):
    prompt = np.random.default_rng(1).integers(0, 256, 60).tolist()
    config = KvCacheConfig(tokens_per_block=4, max_tokens=1024, max_attention_window=(20, 4096, 9))
    more = {"kv_cache_manager": WindowManager} if pools else {}
    llm = open_llm(llama, kv_cache=config, max_num_tokens=16, **more)
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    expected = windowed_reference(llama, prompt, 12, (20, None, 9))
    assert list(output.output_token_ids) == expected
    plain = open_llm(llama).generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    assert tokens(plain) != [expected]
    if pools:
        assert [one.window for one in llm.layouts] == [None, 20, 9]


def test_other_windows_are_another_model_to_a_store(open_llm, llama, tmp_path):
    store = f"disk://{tmp_path}/kv?capacity=32MiB"
    prompt = np.random.default_rng(1).integers(0, 256, 60).tolist()

    def one_pool(config, layouts, device):  # where windows are masks, the layout says nothing
        return KVCacheManager(config, layouts, device)

    def ask(windows):
        config = KvCacheConfig(tokens_per_block=16, max_tokens=1024, max_attention_window=windows)
        more = {"connector": store, "kv_cache": config, "kv_cache_manager": one_pool}
        with open_llm(llama, **more) as llm:
            return llm.generate(prompt, GREEDY)[0].reused_store_tokens

    assert [ask(None), ask((20,)), ask((20,)), ask((4096,))] == [0, 0, 59, 59]


# ---------------------------------------------------------------- which layers share a pool


def shape(window=None, heads=2, dim=16):
    return LayerShape(heads, dim, dim, window)


def test_the_shorter_window_counts():
    layers = [shape(), shape(64), shape(64), shape()]
    assert effective_windows(layers, None, None) == (None, 64, 64, None)
    assert effective_windows(layers, [32], None) == (32, 32, 32, 32)
    assert effective_windows(layers, [4096, 100], None) == (4096, 64, 64, 100)


def test_a_window_that_holds_the_longest_sequence_is_none():
    assert effective_windows([shape(), shape(64)], [512, 512], 512) == (None, 64)
    assert effective_windows([shape(), shape(64)], [512, 512], 64) == (None, None)


def test_groups_are_full_attention_first_then_by_window_descending():
    layers = [shape(8), shape(64), shape(), shape(heads=1), shape(8), shape()]
    windows = effective_windows(layers, None, None)
    layouts = group_layouts(layers, windows, tokens_per_block=4, dtype=torch.float32)
    assert [(one.window, one.num_kv_heads, one.layers) for one in layouts] == [
        (None, 2, (2, 5)),
        (None, 1, (3,)),
        (64, 2, (1,)),
        (8, 2, (0, 4)),
    ]
