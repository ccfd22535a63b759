"""SGLang's own host pools, in plain host memory."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang_pools import DIM, HEADS, LATENT, LAYERS, PAGE, PAGES, SLOTS, STATE_LAYERS

CPU = torch.device("cpu")


def host_pool(layout: str, *, is_mla: bool = False, heads: int = HEADS, pages: int = PAGES) -> Any:
    """One of `pages` pages of `PAGE` tokens, with `heads` heads where it has no latents."""
    tokens = PAGE * (pages - 1)  # one page more is added
    sizes = {
        "host_to_device_ratio": 1.0,
        "host_size": 0,
        "page_size": PAGE,
        "layout": layout,
        "pin_memory": False,
        "device": "cpu",
        "device_capacity_tokens": tokens,
        "start_layer": 0,
        "end_layer": LAYERS,
    }
    if is_mla:
        buffers = tuple(torch.zeros(tokens, 1, LATENT) for _ in range(LAYERS))
        info = MLABufferInfo(
            buffers=buffers,
            data_ptrs=torch.tensor([one.data_ptr() for one in buffers]),
            layer_indices=tuple(range(LAYERS)),
            device_layer_num=LAYERS,
            page_size=PAGE,
            kv_lora_rank=LATENT - 8,
            qk_rope_head_dim=8,
            kv_cache_dim=LATENT,
            dtype=torch.float32,
            device=CPU,
        )
        pool = MLATokenToKVPoolHost(info, target_layer_num=LAYERS, **sizes)
    else:
        keys, values = (
            tuple(torch.zeros(tokens, heads, DIM) for _ in range(LAYERS)) for _ in range(2)
        )
        info = MHABufferInfo(
            buffers=KVBuffers(
                k=keys,
                v=values,
                k_data_ptrs=torch.tensor([one.data_ptr() for one in keys]),
                v_data_ptrs=torch.tensor([one.data_ptr() for one in values]),
                layout=KVBufferLayout.NHD,
            ),
            page_size=PAGE,
            head_num=heads,
            head_dim=DIM,
            v_head_dim=DIM,
            dtype=torch.float32,
            device=CPU,
        )
        pool = MHATokenToKVPoolHost(info, **sizes)
    pool.is_mla = is_mla
    assert pool.page_num == pages
    return pool


def state_pool(
    layout: str = "page_first",
    *,
    temporal: tuple[int, ...] = (2, 8, 8),
    conv: tuple[tuple[int, ...], ...] = ((24, 3),),
    side: tuple[int, ...] | None = None,
) -> Any:
    """One of `SLOTS` states; `side` is the shape of what a slot has beside its layers."""
    slots = SLOTS - 1  # one more is added

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(STATE_LAYERS, slots, *shape, dtype=dtype)

    info = MambaStateBufferInfo(
        temporal=zeros(temporal, torch.float32),
        conv=tuple(zeros(one, torch.bfloat16) for one in conv),
        extra_checkpoint_buffers=() if side is None else (torch.zeros(slots, *side),),
    )
    pool = MambaPoolHost(
        info, 1.0, 0, device_capacity=slots, pin_memory=False, device="cpu", layout=layout
    )
    assert pool.page_num == SLOTS
    return pool
