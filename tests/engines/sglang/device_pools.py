"""Pools on the device, as far as SGLang's cache controller reads them."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang_pools import LAYERS


class MhaDevicePool:
    """What the controller reads of the pool on the device, which nothing is moved from here."""

    device, layer_num = "cpu", LAYERS

    def register_layer_transfer_counter(self, counter: Any) -> None:
        """Nothing waits for layers."""


class MlaDevicePool(MhaDevicePool, MLATokenToKVPool):
    """SGLang asks whether it is one of its own class."""

    def __init__(self) -> None:
        """Without memory."""


class Allocator:
    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def get_kvcache(self) -> Any:
        return self._pool
