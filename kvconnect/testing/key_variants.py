"""Makes store keys that differ in one ingredient each."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import torch

from kvconnect.keys import BlockKey, Namespace, Shard, chain_key, root_key, store_key
from kvconnect.layout import KvCacheLayout

_LAYOUT = KvCacheLayout(2, 2, 16, 16, 16, torch.float32)
_TOKENS = np.arange(16, dtype=np.int32)


def _key(
    model: bytes = b"model, revision 1",
    layout: KvCacheLayout = _LAYOUT,
    namespace: Namespace | None = None,
    shard: Shard | None = None,
    tokens: np.ndarray = _TOKENS,
    group: int = 0,
) -> BlockKey:
    root = root_key(model, [layout], namespace or Namespace())
    return store_key(chain_key(root, tokens), group, shard or Shard())


def variants() -> dict[str, BlockKey]:
    """Returns store keys that differ from the first one in one ingredient each."""
    return {
        "nothing": _key(),
        "model": _key(b"another model, revision 1"),
        "revision": _key(b"model, revision 2"),
        "dtype": _key(layout=replace(_LAYOUT, dtype=torch.bfloat16)),
        "layers": _key(layout=replace(_LAYOUT, num_layers=3)),
        "heads": _key(layout=replace(_LAYOUT, num_kv_heads=4)),
        "head size": _key(layout=replace(_LAYOUT, key_dim=32, value_dim=32)),
        "window": _key(layout=replace(_LAYOUT, window=64)),
        "tokens per block": _key(layout=replace(_LAYOUT, tokens_per_block=32)),
        "salt": _key(namespace=Namespace(cache_salt="one tenant")),
        "another salt": _key(namespace=Namespace(cache_salt="another tenant")),
        "adapter": _key(namespace=Namespace(lora_id="digest of an adapter")),
        "extra key": _key(namespace=Namespace(extra_key="picture")),
        "tensor-parallel rank": _key(shard=Shard(1, 2)),
        "tensor-parallel size": _key(shard=Shard(0, 2)),
        "pipeline rank": _key(shard=Shard(0, 1, 1, 2)),
        "pipeline size": _key(shard=Shard(0, 1, 0, 2)),
        "pool group": _key(group=1),
        "tokens": _key(tokens=_TOKENS[::-1].copy()),
        "chunking": _key(tokens=_TOKENS[:8]),
    }


def digest() -> str:
    """Returns a digest that is the same in every process, whatever its hash seed."""
    return hashlib.blake2b(b"".join(variants().values())).hexdigest()
