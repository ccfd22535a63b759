"""Planted identities with SGLang's own classes: updates of weights, configurations, inputs."""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed here: make test-engines")

from real_pools import host_pool
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput, GenerateReqInput
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context, get_parallel
from sglang_pools import PAGE, fill, save, storage_config, works

from kvconnect.engine.checkpoint.random_model import ARCHITECTURES, make_model
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.sglang import KvConnectStorage, weights
from kvconnect.integrations.sglang.server import changed_configuration
from kvconnect.integrations.sglang.weights import RELEASES, WRITES, Updates

# ------------------------------------------------------------------ the resolved configuration


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_sglang_makes_of_usual_models_is_what_their_files_hold(arch, tmp_path):
    directory = make_model(tmp_path / "model", arch, num_layers=2)
    assert changed_configuration(ModelConfig(str(directory)), directory) is None


@pytest.mark.planted("overridden-configuration", "sglang", "key")
def test_what_sglang_was_made_to_change_is_another_configuration(tmp_path):
    directory = make_model(tmp_path / "model", "llama", num_layers=2)
    digests = {
        changed_configuration(ModelConfig(str(directory), model_override_args=args), directory)
        for args in ('{"rms_norm_eps": 0.5}', '{"rope_scaling": {"rope_theta": 7.0}}', "{}")
    }
    assert len(digests) == 3
    assert None in digests


@pytest.mark.planted("dynamic-rope", "sglang", "equal")
def test_dynamic_rope_turns_a_token_by_its_position_alone(monkeypatch):
    ops = SimpleNamespace(rotary_embedding=None)  # a kernel that is asked for, and not used
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", ops)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(_custom_ops=ops))
    kind = import_module("sglang.srt.layers.rotary_embedding.rope_variant")
    rope = kind.DynamicNTKScalingRotaryEmbedding(8, 8, 64, 10_000, True, 4.0, torch.float32)

    def key_at_3(*others: int) -> torch.Tensor:
        positions = torch.tensor([3, *others])
        ones = torch.ones(len(positions), 8)
        return rope.forward_native(positions, ones, ones)[1][0]

    assert torch.equal(key_at_3(), key_at_3(63))
    assert torch.equal(key_at_3(), key_at_3(64, 200))


# ------------------------------------------------------------------ what comes with a request


def page_names(**more: Any) -> list[str]:
    key = RadixKey(array("q", range(3 * PAGE)), **more)
    return get_storage_hash_str(key, None, page_size=PAGE)


@pytest.mark.planted("other-salt", "sglang", "key")
@pytest.mark.planted("long-salt", "sglang", "key")
def test_salts_and_extra_keys_of_any_length_are_in_the_names_of_pages():
    long = "a" * 5000
    given: list[dict[str, str]] = [
        *({"cache_salt": salt} for salt in ("a", "b", long, long + "b")),
        *({"extra_key": key} for key in ("", "a", "b", long, long + "b")),
        *({"cache_salt": "a", "extra_key": "b"}, {"cache_salt": "ab", "extra_key": ""}),
    ]
    named = [tuple(page_names(**one)) for one in ({}, *given)]
    assert len({name for names in named for name in names}) == 3 * len(named)
    assert page_names(cache_salt="") == page_names()


def test_clients_give_hashes_to_pictures_and_shapes_are_not_in_them():
    """The reason why servers that take pictures are refused."""

    def picture(*shape: int) -> MultimodalDataItem:
        return MultimodalDataItem(modality=Modality.IMAGE, feature=torch.ones(shape))

    for one in (wide := picture(2, 8), high := picture(8, 2)):
        one.set_pad_value()
    assert wide.pad_values == high.pad_values
    other = MultimodalDataItem(modality=Modality.IMAGE, feature=torch.zeros(2, 8))
    # As TokenizerManager does with ``mm_hashes`` of a request.
    other.set_hash(int(f"{wide.hash:x}", 16))
    assert other.pad_values == wide.pad_values


@pytest.mark.planted("prompt-embeddings", "sglang", "refused")
def test_sglang_refuses_prompts_given_as_embeddings_where_pages_are_shared():
    request = GenerateReqInput(input_embeds=[[0.0, 1.0]])
    manager = object.__new__(TokenizerManager)
    with (
        get_context().override_server_args(disable_radix_cache=False),
        pytest.raises(ValueError, match="disable_radix_cache"),
    ):
        asyncio.run(manager._tokenize_one_request(request))


# ------------------------------------------------------------------ weights of a running server


class Model(torch.nn.Module):
    """Loads as SGLang's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 64, bias=False)

    def load_weights(self, named: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in named:
            default_weight_loader(parameters[name], weight)


Model.__module__ = LlamaForCausalLM.__module__


class Starting(Scheduler):
    """A scheduler that makes nothing but its storage."""

    def __init__(self, model: Path, make: Callable[[], Any]) -> None:
        inner = Model()
        config = ModelConfig(str(model))
        self.runner = runner = SimpleNamespace(
            model=inner, model_config=config, is_draft_worker=False
        )
        runner.weight_updater = WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=config,
            custom_weight_loaders={},
            get_model=lambda: inner,
            update_model_fields=lambda *_, **__: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: runner,
        )
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.enable_hierarchical_cache = True
        self.storage = make()


class Started:
    """Servers' storages, each made as SGLang makes it."""

    def __init__(self, model: Path, url: str) -> None:
        self._model, self._url = model, url
        self.open: list[KvConnectStorage] = []

    def start(self) -> Starting:
        return Starting(self._model, self.storage)

    def storage(self, **more: Any) -> KvConnectStorage:
        config = storage_config(self._model, self._url, make=HiCacheStorageConfig, **more)
        self.open.append(KvConnectStorage(config, {}))
        pool = host_pool("page_first")
        fill(pool)
        self.open[-1].register_mem_pool_host(pool)
        return self.open[-1]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    model = make_model(tmp_path / "model", "llama", num_layers=2)
    HookRegistry.reset()
    for cls, names in ((WeightUpdater, WRITES), (SchedulerWeightUpdaterManager, (RELEASES,))):
        for name in names:  # put back afterwards
            monkeypatch.setattr(cls, name, getattr(cls, name))
    monkeypatch.setattr(weights, "updates", Updates())
    made = Started(model, f"disk://{tmp_path}/kv?capacity=64MiB")
    with (
        get_context().override_server_args(model_path=str(model)),
        get_parallel().override(tp_rank=0, tp_size=1),
    ):
        yield made
        for one in made.open:
            one.close()


def from_tensor(updater: Any) -> None:
    weight = torch.full((64, 64), 2.0)
    assert updater.update_weights_from_tensor([("inner.weight", weight)], "direct")[0]


def from_group(updater: Any) -> None:
    assert updater.load_weights_from_distributed([("inner.weight", torch.zeros(64, 64))])[0]


def from_ipc(updater: Any) -> None:
    updater.update_weights_from_ipc(SimpleNamespace(zmq_handles={}))


def from_disk(updater: Any) -> None:
    updater.update_weights_from_disk("/nowhere", "auto")


def between(updater: Any) -> None:
    """Written by others, between these two calls."""
    updater.begin_weight_update()
    updater.end_weight_update(run_post_load=False)


@pytest.mark.parametrize(
    "replace",
    [
        pytest.param(from_disk, marks=pytest.mark.planted("weights-reloaded", "sglang", "refused")),
        pytest.param(
            from_tensor, marks=pytest.mark.planted("weights-updated", "sglang", "refused")
        ),
        pytest.param(from_group, marks=pytest.mark.planted("weights-updated", "sglang", "refused")),
        pytest.param(from_ipc, marks=pytest.mark.planted("weights-updated", "sglang", "refused")),
        pytest.param(between, marks=pytest.mark.planted("weights-updated", "sglang", "refused")),
    ],
)
def test_every_update_of_sglang_ends_the_storage(started, replace):
    scheduler = started.start()
    assert save(scheduler.storage)
    assert works(scheduler.storage)
    try:
        replace(scheduler.runner.weight_updater)
    except (OSError, ValueError):
        assert replace is from_disk  # nothing is there; SGLang may have written before it fails
    assert not works(scheduler.storage)


def test_the_methods_that_write_weights_are_all_hooked():
    """A method that is new in SGLang has to be looked at."""
    public = {
        name
        for name, value in vars(WeightUpdater).items()
        if callable(value) and not name.startswith("_")
    }
    assert public - set(WRITES) == {
        *("init_weights_update_group", "destroy_weights_update_group"),
        *("receive_weights_from_distributed", "end_weight_update"),
    }


@pytest.mark.planted("uncounted-write", "sglang", "refused")
def test_weights_that_sglang_s_loader_writes_elsewhere_are_seen(started):
    scheduler = started.start()
    save(scheduler.storage)
    assert works(scheduler.storage)
    before = scheduler.runner.model.inner.weight._version
    scheduler.runner.model.load_weights([("inner.weight", torch.zeros(64, 64))])
    assert scheduler.runner.model.inner.weight._version == before
    assert not works(scheduler.storage)


@pytest.mark.planted("paused", "sglang", "hit")
def test_memory_that_comes_back_with_its_content_keeps_the_storage(started):
    scheduler = started.start()
    save(scheduler.storage)
    manager = object.__new__(SchedulerWeightUpdaterManager)
    manager.memory_saver_adapter = SimpleNamespace(enabled=False, pause=lambda tag: None)
    manager.scheduler, manager.offload_tags = None, set()
    manager.is_fully_idle, manager.flush_cache = (lambda **_: True), scheduler.storage.clear
    manager.release_memory_occupation(SimpleNamespace(tags=["kv_cache"]))
    assert works(scheduler.storage)
    manager.memory_saver_adapter.enabled = True
    manager.release_memory_occupation(SimpleNamespace(tags=["kv_cache"]))
    assert works(scheduler.storage)
    with pytest.raises(AttributeError):  # it has no model to free
        manager.release_memory_occupation(SimpleNamespace(tags=["weights"]))
    assert not works(scheduler.storage)


def test_a_running_server_is_asked_to_name_its_weights(started):
    def attach(**more: Any) -> Any:
        def attach_storage_backend(**_: Any) -> tuple[bool, str]:
            started.storage(**more)
            return True, ""

        scheduler.tree_cache = SimpleNamespace(
            attach_storage_backend=attach_storage_backend, total_size=lambda: (0, 0)
        )
        request = AttachHiCacheStorageReqInput(hicache_storage_backend="dynamic")
        return scheduler.attach_hicache_storage_wrapped(request)

    scheduler = Starting(started._model, lambda: None)
    scheduler.is_fully_idle = lambda: True
    refused = attach()
    assert not refused.success
    assert "model_revision" in refused.message
    assert attach(model_revision="org/name@1").success
    assert save(started.open[-1])
    assert works(started.open[-1])
    from_group(scheduler.runner.weight_updater)
    assert not works(started.open[-1])


def test_a_server_whose_scheduler_is_not_in_the_call_is_refused(started):
    with pytest.raises(ConfigurationError, match="model_revision"):
        started.storage()
