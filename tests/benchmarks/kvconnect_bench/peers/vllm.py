"""The process of vLLM's `KVCacheManager`, in an interpreter that has vLLM."""

from __future__ import annotations

import itertools
import sys
import time
from importlib import import_module
from typing import Any

import numpy as np

from kvconnect_bench.blocks.traffic import BLOCK, TokenIds
from kvconnect_bench.blocks.worker import serve, take_stdout, workloads


class VllmCache:
    """A `KVCacheManager` of one full-attention group, as vLLM's scheduler drives it.

    Args:
        num_blocks: blocks that hold tokens; vLLM keeps one more for itself.
        hashing: whether hashing the tokens of a request counts as matching it. If not, a request is
            hashed when it is made.
    """

    def __init__(self, num_blocks: int, *, hashing: bool) -> None:
        interface = import_module("vllm.v1.kv_cache_interface")
        keys = import_module("vllm.v1.core.kv_cache_utils")
        spec = interface.FullAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=1,
            head_size=1,
            dtype=import_module("torch").float16,
        )
        config = interface.KVCacheConfig(
            num_blocks=num_blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
        )
        self._manager = import_module("vllm.v1.core.kv_cache_manager").KVCacheManager(
            config,
            max_model_len=1 << 24,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        sha256 = import_module("vllm.utils.hashing").sha256
        keys.init_none_hash(sha256)
        self._hasher = keys.get_request_block_hasher(BLOCK, sha256)
        self._hashing = hashing
        self._make_request = import_module("vllm.v1.request").Request
        self._params = import_module("vllm.sampling_params").SamplingParams(max_tokens=1)
        self._numbers = itertools.count()

    def request(self, tokens: TokenIds) -> list[Any]:
        """Returns the request, the blocks that matched, and how many tokens matched."""
        request = self._make_request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=tokens.tolist(),
            sampling_params=self._params,
            pooling_params=None,
            block_hasher=None if self._hashing else self._hasher,
        )
        return [request, None, 0]

    def match(self, request: list[Any]) -> None:
        """Implements `Cache.match`."""
        own = request[0]
        if self._hashing:
            own.block_hashes = self._hasher(own)
        request[1], request[2] = self._manager.get_computed_blocks(own)[:2]

    def claim(self, request: list[Any]) -> None:
        """Implements `Cache.claim`."""
        own, blocks, matched = request
        fresh = own.num_tokens - matched
        if self._manager.allocate_slots(own, fresh, matched, blocks) is None:
            raise MemoryError("vLLM found no blocks")
        self._manager.get_block_ids(own.request_id)
        own.num_computed_tokens = own.num_tokens

    def publish(self, request: list[Any]) -> None:
        """Does nothing: vLLM caches the blocks of a step when `claim` allocates them."""

    def release(self, request: list[Any]) -> None:
        """Implements `Cache.release`."""
        self._manager.free(request[0])

    def hash_seconds_per_block(self, tokens: int, repeats: int) -> dict[str, list[float]]:
        """Returns the seconds per block that hashing a request takes."""
        rng = np.random.default_rng(4)
        spent = []
        for _ in range(repeats):
            own = self.request(rng.integers(0, 100_000, tokens, dtype=np.int32))[0]
            start = time.perf_counter()
            self._hasher(own)
            spent.append((time.perf_counter() - start) * BLOCK / tokens)
        return {"first": spent}


def main() -> None:
    """Serves until standard input ends; the argument ``hashing`` adds the time of hashing."""
    answers = take_stdout()
    hashing = "hashing" in sys.argv[1:]
    version: str = import_module("vllm.version").__version__
    served = workloads(lambda num_blocks: VllmCache(num_blocks, hashing=hashing))
    keys = VllmCache(1, hashing=True)
    serve(answers, {"version": version}, served | {"keys": keys.hash_seconds_per_block})


if __name__ == "__main__":
    main()
