"""The name of a stored chunk: everything that its bytes depend on, besides its tokens.

vLLM names a chunk by a hash over its tokens, all tokens before them, the adapter's name and path,
pictures and the cache salt. Other causes of different chunks are put into the keys here. Causes
that a tier cannot see are refused, since chunks of different content would have one name.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvconnect.digest.model import check_revision
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.core.configuration import refuse
from kvconnect.integrations.vllm.identity import (
    comes_from_directory,
    model_identity,
    settings_of_model,
    vllm_version,
)
from kvconnect.integrations.vllm_tier.settings import KvConnectTierSettings
from kvconnect.keys import BlockKey, Namespace, model_tag, root_key
from kvconnect.layout import KvCacheLayout

HASH_NBYTES = 32
"""The size of vLLM's cryptographic hashes; others are not trusted."""

_HASHES = ("sha256", "sha256_cbor")
_DRAFTS_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")


def chunk_layout(row_nbytes: int, tokens: int) -> KvCacheLayout:
    """Returns a layout of a chunk as one plane of bytes, in vLLM's own arrangement.

    Args:
        row_nbytes: the bytes of a chunk in the host memory, all ranks and layers.
        tokens: that it holds; the layout has the largest power of two that divides it and fits.
    """
    size = 2
    while tokens % (2 * size) == 0 and row_nbytes % (2 * size) == 0:
        size *= 2
    return KvCacheLayout(
        num_layers=1,
        num_kv_heads=1,
        key_dim=row_nbytes // size,
        value_dim=0,
        tokens_per_block=size,
        dtype=torch.uint8,
    )


@dataclass(frozen=True)
class ChunkNames:
    """The keys of chunks of one model and cache geometry.

    Attributes:
        digest: 32 bytes, of `chunks_digest`.
        layout: the layout of a chunk.
    """

    digest: bytes
    layout: KvCacheLayout

    @cached_property
    def root(self) -> BlockKey:
        """The key before the first chunk of any prompt."""
        return root_key(self.digest, [self.layout], Namespace())

    @cached_property
    def model(self) -> bytes:
        """The tag of model and geometry in the store."""
        return model_tag(self.digest, [self.layout])

    @cached_property
    def namespace(self) -> bytes:
        """The tag of the namespace in the store, without a salt, which vLLM's hashes cover."""
        return Namespace().encode()

    def with_weights(self, name: str) -> ChunkNames:
        """Returns the names of chunks that other weights compute, which `name` stands for."""
        state = hashlib.blake2b(self.digest, digest_size=32, person=b"kvc-weights")
        state.update(name.encode())
        return ChunkNames(state.digest(), self.layout)

    def block_key(self, chunk: bytes) -> BlockKey:
        """Returns the key of vLLM's `chunk`: block hash and group number; ``b""`` is the root."""
        if not chunk:
            return self.root
        state = hashlib.blake2b(digest_size=32, person=b"kvc-vllm-chunk")
        state.update(self.root)
        state.update(chunk)
        return BlockKey(state.digest())


def chunks_digest(spec: Any, config: Any, settings: KvConnectTierSettings) -> bytes:
    """Returns 32 bytes that differ if equal tokens have chunks of other bytes.

    Reads the model's weights, unless a revision stands for them.

    Args:
        spec: vLLM's ``OffloadingSpec``.
        config: vLLM's ``VllmConfig``.
        settings: the settings of the tier.

    Raises:
        ConfigurationError: in this configuration a chunk's name does not cover its content.
    """
    from vllm.platforms import current_platform

    _check(config)
    offload = spec.config
    model, parallel = config.model_config, offload.parallel
    told = {
        "vllm": vllm_version(),
        "device": [current_platform.device_type, str(current_platform.get_device_capability())],
        "namespace": settings.namespace,
        "config": model.hf_config.to_json_string(use_diff=False),
        "dtype": [str(model.dtype), offload.model.dtype],
        "groups": [
            [group.group_id, group.tokens_per_block, list(group.layer_names)]
            for group in offload.groups
        ],
        "chunk": [offload.cache.tokens_per_hash, offload.cache.blocks_per_chunk],
        "nbytes": offload.worker_kv_bytes_per_block,
        "layout": [offload.kv_cache_layout, offload.canonical_layout, offload.replicated_layout],
        "attention": config.attention_config.compute_hash(),
        "parallel": [
            parallel.world_size,
            parallel.tp_size,
            parallel.pp_size,
            parallel.pcp_size,
            parallel.dcp_size,
        ],
        "hash": config.cache_config.prefix_caching_hash_algo,
    }
    told |= settings_of_model(config)
    if getattr(config.cache_config, "mamba_cache_mode", "none") != "none":
        told["states"] = repr(config.mamba_config)  # each kernel has states in its own form
    state = hashlib.blake2b(digest_size=32, person=b"kvc-vllm-tier")
    state.update(_model_digest(config, settings.model_revision))
    state.update(json.dumps(told, sort_keys=True).encode())
    return state.digest()


def _check(config: Any) -> None:
    algorithm = config.cache_config.prefix_caching_hash_algo
    speculative = config.speculative_config
    drafts = None if speculative is None else speculative.method
    refuse(
        {
            f"prefix_caching_hash_algo={algorithm}: chunks of different tokens could have one "
            f"name; give {' or '.join(_HASHES)}": algorithm not in _HASHES,
            "enable_lora: vLLM names chunks by an adapter's name and path, so that another adapter "
            "in its place would be given its KV; use the connector KvConnect, which digests them": (
                config.lora_config is not None
            ),
            f"speculative_config.method={drafts}: chunks would hold the KV of a draft model that "
            f"their names leave out; served are {', '.join(_DRAFTS_WITHOUT_MODEL)}": (
                speculative is not None and drafts not in _DRAFTS_WITHOUT_MODEL
            ),
            "calculate_kv_scales: the scales of a quantized cache come from the first prompts, and "
            "are not in the chunks; use scales of the checkpoint": (
                getattr(config.cache_config, "calculate_kv_scales", False)
            ),
        }
    )


def _model_digest(config: Any, revision: str | None) -> bytes:
    check_revision(revision)
    if revision is None and not comes_from_directory(config):
        raise ConfigurationError(
            f"load_format={config.load_config.load_format}: the weights need not be those of the "
            "model's directory, which names of chunks cover; give the tier a model_revision"
        )
    return model_identity(config, revision=revision, since_ns=_started_ns())


def _started_ns() -> int | None:
    """Returns when the engine may have begun to load; ``None``: with its process.

    A tier in the user's own process is made only when the weights are loaded.
    """
    return None if multiprocessing.parent_process() is not None else time.time_ns()
