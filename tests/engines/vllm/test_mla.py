"""Models that keep one latent vector for each token (MLA), as DeepSeek's do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import torch
from vllm_engine import SIZE, connector, engine, prompts_of

from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.vllm import KvConnect, identity
from kvconnect.integrations.vllm.worker import WorkerHalf

pytestmark = pytest.mark.engines

LATENT, ROPE = 512, 64  # of DeepSeek-V2 and V3: vLLM's kernel on the CPU knows no others
BLOCK = 16  # nor blocks of another size
[PROMPT] = prompts_of(19 * BLOCK + 5)
WHOLE = 19 * BLOCK


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("models") / "deepseek",
        "deepseek_v3",
        config_overrides={
            "kv_lora_rank": LATENT,
            "qk_rope_head_dim": ROPE,
            "first_k_dense_replace": SIZE["num_layers"],
        },
        **SIZE,
    )


@dataclass
class Watched:
    """Where the engine of this process has its blocks, by key.

    Attributes:
        pool: of each layer, a view by block.
        saved, loaded: ids of blocks.
    """

    pool: list[torch.Tensor] = field(default_factory=list)
    saved: dict[bytes, int] = field(default_factory=dict)
    loaded: dict[bytes, int] = field(default_factory=dict)

    def latents(self, ids: dict[bytes, int]) -> dict[bytes, torch.Tensor]:
        """Copies, ``[layers, tokens, dim]`` each."""
        return {
            key: torch.stack([layer[number].reshape(BLOCK, -1) for layer in self.pool])
            for key, number in ids.items()
        }


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    found = Watched()
    register, bind = KvConnect.register_kv_caches, WorkerHalf.bind

    def note_pool(self, kv_caches):
        found.pool = [kv_caches[name] for name in sorted(kv_caches)]
        found.saved, found.loaded = {}, {}
        register(self, kv_caches)

    def note_ids(self, meta):
        if meta.offload is not None:
            for order in meta.offload.saves:
                found.saved.update((one.key, one.block_id) for one in order.blocks)
            for load in meta.offload.loads:
                found.loaded.update((one.key, one.block_id) for one in load.blocks)
        bind(self, meta)

    monkeypatch.setattr(KvConnect, "register_kv_caches", note_pool)
    monkeypatch.setattr(WorkerHalf, "bind", note_ids)
    return found


def test_on_this_cpu_such_a_model_is_refused_at_the_start(deepseek, store):
    """As vLLM's own prefix cache of it is switched off there."""
    refused = pytest.raises(ConfigurationError, match="keeps latents")
    with refused, engine(deepseek, connector(store), block_size=BLOCK):
        pass


def test_latents_are_loaded_bit_by_bit(deepseek, store, watched, monkeypatch):
    """What is stored and loaded where such a model is served: the pool is the same everywhere."""
    monkeypatch.setattr(identity, "_refuse_latents_on_cpu", lambda _: None)
    with engine(deepseek, connector(store), block_size=BLOCK) as first:
        [group] = first.scheduler.kv_cache_config.kv_cache_groups
        assert type(group.kv_cache_spec).__name__ == "MLAAttentionSpec"
        [cold] = first.answer([PROMPT])
        computed = watched.latents(watched.saved)
    with engine(deepseek, connector(store), block_size=BLOCK) as second:
        [loaded] = second.answer([PROMPT])
        found = watched.latents(watched.loaded)
    assert (cold.cached, loaded.cached, len(found)) == (0, WHOLE, WHOLE // BLOCK)
    for key, latents in found.items():
        assert latents.shape == (SIZE["num_layers"], BLOCK, LATENT + ROPE)
        assert latents.any()
        assert torch.equal(latents, computed[key])
