"""The process of SGLang's radix cache, in an interpreter that has SGLang."""

from __future__ import annotations

from array import array
from importlib import import_module
from typing import Any

import numpy as np

from kvconnect_bench.blocks.traffic import BLOCK, TokenIds
from kvconnect_bench.blocks.worker import serve, take_stdout, workloads

_TREE = "sglang.srt.mem_cache"


class SglangCache:
    """A unified radix cache with its paged allocator on the CPU, as SGLang's scheduler drives them.

    SGLang counts in tokens, so sizes and ids here are of tokens, in whole pages.
    """

    def __init__(self, num_blocks: int) -> None:
        self._torch = torch = import_module("torch")
        self._prefix = import_module(f"{_TREE}.base_prefix_cache")
        self._key = import_module(f"{_TREE}.radix_cache").RadixKey
        components = import_module(f"{_TREE}.unified_cache.component_type").ComponentType
        self._allocator = import_module(f"{_TREE}.allocator.paged").PagedTokenToKVPoolAllocator(
            num_blocks * BLOCK, BLOCK, torch.float16, "cpu", None, need_sort=False
        )
        params = import_module(f"{_TREE}.cache_init_params").CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self._allocator,
            page_size=BLOCK,
            tree_components=(components.FULL,),
        )
        self._tree = import_module(f"{_TREE}.unified_radix_cache").UnifiedRadixCache(params)

    @property
    def tree_name(self) -> str:
        """The class of the tree that this version of SGLang chose."""
        return type(self._tree.tree_core).__name__

    def request(self, tokens: TokenIds) -> dict[str, Any]:
        """Implements `Cache.request`: a dict that the other methods extend."""
        return {"tokens": array("q", tokens.astype(np.int64).tobytes())}

    def match(self, request: dict[str, Any]) -> None:
        """Implements `Cache.match`."""
        tokens = request["tokens"]
        key = self._key(tokens, limit=len(tokens) - 1)
        request["match"] = self._tree.match_prefix(self._prefix.MatchPrefixParams(key=key))

    def claim(self, request: dict[str, Any]) -> None:
        """Implements `Cache.claim`."""
        node = request["match"].last_device_node
        request["lock"] = self._tree.lock(node)
        matched = self._tree.path_device_indices(node)
        needed = -(-len(request["tokens"]) // BLOCK) * BLOCK - len(matched)
        missing = needed - self._allocator.available_size()
        if missing > 0:
            self._tree.evict(self._prefix.EvictParams(num_tokens=missing))
        own = self._allocator.alloc(needed)
        if own is None:
            raise MemoryError("SGLang found no blocks")
        request["matched"] = len(matched)
        request["ids"] = self._torch.cat((matched, own))

    def publish(self, request: dict[str, Any]) -> None:
        """Implements `Cache.publish`."""
        inserted = self._tree.insert(
            self._prefix.InsertParams(
                key=self._key(request["tokens"]).page_aligned(BLOCK),
                value=request["ids"],
                prev_prefix_len=request["matched"],
            )
        )
        self._tree.unlock(request["lock"])
        request["lock"] = self._tree.lock(inserted.last_device_node)
        request["published"] = True

    def release(self, request: dict[str, Any]) -> None:
        """Implements `Cache.release`."""
        self._tree.unlock(request["lock"])
        if "published" not in request:
            self._allocator.free(request["ids"][request["matched"] :])


def main() -> None:
    """Serves the workloads of all parties until standard input ends."""
    answers = take_stdout()
    version: str = import_module("sglang.version").__version__
    tree = SglangCache(1).tree_name
    serve(answers, {"version": version, "tree": tree}, workloads(SglangCache))


if __name__ == "__main__":
    main()
