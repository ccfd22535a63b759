"""How many blocks fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvconnect.cache.block_manager import BlockManager
from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.cache.memory.sizing import DEFAULT_CPU_BYTES, pool_sizes
from kvconnect.config import KvCacheConfig
from kvconnect.errors import ConfigurationError
from kvconnect.keys import Namespace, root_key
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest, SamplingParams

LAYOUT = KvCacheLayout(4, 2, 8, 8, 16, torch.float32)  # 8 KiB a block


def blocks(**settings):
    return pool_sizes(KvCacheConfig(tokens_per_block=16, **settings), LAYOUT).num_blocks[0]


def test_tokens_are_rounded_up_bytes_down_and_the_smallest_limit_wins():
    assert [blocks(max_tokens=count) for count in (1, 16, 17, 1600)] == [1, 1, 2, 100]
    assert [blocks(max_gpu_total_bytes=nbytes) for nbytes in (8192, 16383, 16384)] == [1, 1, 2]
    assert blocks(max_tokens=160, max_gpu_total_bytes=3 * 8192) == 3
    assert blocks(max_tokens=32, max_gpu_total_bytes=3 * 8192) == 2


def test_without_cuda_and_without_a_limit_it_is_a_gibibyte():
    assert blocks() * LAYOUT.block_nbytes == DEFAULT_CPU_BYTES == 1 << 30
    assert blocks(free_gpu_memory_fraction=0.1) == blocks()


def test_no_room_for_one_block_names_the_limit():
    with pytest.raises(ConfigurationError, match=r"max_gpu_total_bytes: 8191 .* 8192 bytes"):
        blocks(max_gpu_total_bytes=8191)


def test_managers_take_their_size_from_the_configuration():
    config = KvCacheConfig(tokens_per_block=16, max_tokens=100)
    assert BlockManager(config, LAYOUT).max_blocks() == 7
    manager = KVCacheManager(config, [LAYOUT])
    assert manager.get_max_resource_count() == 7
    assert manager.pool_tensor().shape[0] == 7


@pytest.mark.parametrize("sizes", [{"max_tokens": 160}, {"max_tokens": 16}])
@pytest.mark.parametrize("chunk", [1, 24, 1000])
def test_a_request_that_the_empty_cache_could_not_hold_is_known_before_it_is_admitted(sizes, chunk):
    windowed = replace(LAYOUT, num_layers=6, window=40)
    manager = KVCacheManager(KvCacheConfig(tokens_per_block=16, **sizes), [LAYOUT, windowed])
    manager.expect_chunks(chunk)
    answers = set()
    for prompt_len in range(1, 300, 7):
        for max_tokens in (1, 2, 40, 170):
            request = LlmRequest(
                0,
                np.zeros(prompt_len, np.int32),
                chain_root=root_key(bytes(32), manager.layouts, Namespace()),
                tokens_per_block=16,
                sampling_params=SamplingParams(max_tokens=max_tokens),
            )
            fits = manager.could_hold(prompt_len, max_tokens)
            assert fits == manager.ensure_free(manager.needed_blocks(request))
            answers.add(fits)
    assert answers == {True, False}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_it_is_a_fraction_of_what_is_free():
    device = torch.device("cuda")
    config = KvCacheConfig(tokens_per_block=16, free_gpu_memory_fraction=0.25)
    free, _ = torch.cuda.mem_get_info(device)
    nbytes = pool_sizes(config, LAYOUT, device=device).num_blocks[0] * LAYOUT.block_nbytes
    assert 0.2 * free < nbytes <= 0.25 * free
