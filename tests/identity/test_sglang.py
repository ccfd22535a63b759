"""Planted identities behind SGLang's hierarchical cache, with a stand-in for its server.

Those that need SGLang's own classes stand in ``tests/engines/sglang/test_identity.py``.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from file_plants import file_plants, flip_byte, put
from long_rope import LONG
from rows import cells
from sglang_pools import StandInPool, fill, hashes, indices, save, storage_config, works
from sglang_server import WAYS, Server, serving

from kvconnect.digest.doubts import Doubt
from kvconnect.errors import ConfigurationError, ModelChanged, UnsupportedModel
from kvconnect.integrations.core import models
from kvconnect.integrations.sglang import KvConnectStorage
from kvconnect.keys import BlockKey
from kvconnect.trace import metrics

PAGES = 3
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "rope_theta": 10000.0}
EARLIER = "effe09bd8d9b8d1ffc58f48f32447f1fc01b2707637efd485b99189a572124f5"
"""The key of a page of `directory`, as releases before the resolved configuration made it."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model's, with one loader's files."""
    made = tmp_path / "model"
    put(made, "config.json", CONFIG)
    put(made, "model.safetensors", 1)
    return made


class Stored:
    """A store, and servers that run one after the other on it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._open: list[KvConnectStorage] = []

    def open(
        self,
        directory: Path,
        server: Server,
        pool: Any = None,
        *,
        late: bool = False,
        url: str | None = None,
        **more: Any,
    ) -> KvConnectStorage:
        """The storage of `server`, made when it starts or when it runs already."""
        config = storage_config(directory, url or self._url, is_mla=False, **more)
        make = server.attach if late else server.start
        storage = make(lambda: KvConnectStorage(config, {}))
        pool = pool or StandInPool("page_first")
        fill(pool)
        storage.register_mem_pool_host(pool)
        self._open.append(storage)
        return storage

    def save(self, directory: Path, **settings: Any) -> None:
        """Pages of a server with these settings."""
        with serving(directory, **settings) as server:
            save(self.open(directory, server))
        self.close()

    def found(self, directory: Path, pool: Any = None, **settings: Any) -> int:
        """How many of them a server with these settings finds."""
        with serving(directory, **settings) as server:
            found = self.open(directory, server, pool).batch_exists(hashes(PAGES))
        self.close()
        return found

    def key(self, directory: Path, pool: Any = None, **settings: Any) -> BlockKey:
        """The key of a page of a server with these settings."""
        with serving(directory, **settings) as server:
            url = "memory:?capacity=1MiB"
            (key,) = self.open(directory, server, pool, url=url)._keys(hashes(1))
        self.close()
        return key

    def close(self) -> None:
        for one in self._open:
            one.close()
        self._open.clear()


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    made = Stored(f"disk://{tmp_path}/kv?capacity=16MiB")
    yield made
    made.close()


# ------------------------------------------------------------------ the directory's files


@pytest.mark.parametrize("plant", file_plants("sglang", "key"))
def test_every_file_that_a_loader_may_read_is_in_the_keys(stored, directory, plant):
    plant.prepare(directory)
    before = stored.key(directory)
    plant.change(directory)
    assert stored.key(directory) != before


@pytest.mark.planted("weight-byte", "sglang", "key")
def test_one_byte_of_the_weights_is_in_the_keys(stored, directory):
    stored.save(directory)
    assert stored.found(directory) == PAGES
    flip_byte(directory / "model.safetensors")
    assert stored.found(directory) == 0


@pytest.mark.planted("files-alone", "sglang", "hit")
def test_stores_of_earlier_releases_are_found(stored, directory):
    rope = {"rope_theta": 10000.0, "rope_type": "default", "type": "default"}
    added = {"num_hidden_layers": 2, "rope_parameters": rope, "context_len": 512, "v_head_dim": 8}
    assert stored.key(directory, resolved={"hf_config": added}).hex() == EARLIER


@pytest.fixture
def started_now(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """SGLang starts this process at this moment."""

    def start() -> None:
        now = time.time_ns()
        monkeypatch.setattr(models, "process_started_ns", lambda: now)

    return start


@pytest.mark.planted("replaced-after-loading", "sglang", "refused")
def test_files_that_changed_since_the_server_started_are_refused(stored, directory, started_now):
    put(directory, "pytorch_model.bin", 1)
    started_now()
    stored.save(directory)
    put(directory, "pytorch_model.bin", 2)
    with serving(directory) as server, pytest.raises(ModelChanged, match="after this process"):
        stored.open(directory, server)


@pytest.mark.planted("switched-while-loading", "sglang", "refused")
def test_a_link_that_was_switched_since_the_server_started_is_refused(
    stored, directory, started_now, tmp_path
):
    link, moved = tmp_path / "current", tmp_path / "moved"
    link.symlink_to(directory)
    started_now()
    stored.save(link)
    link.unlink()
    link.symlink_to(directory)
    with serving(link) as server, pytest.raises(ModelChanged, match="current"):
        stored.open(link, server)
    directory.rename(moved)
    with serving(moved) as server, pytest.raises(ModelChanged, match="moved"):
        stored.open(moved, server)


# ------------------------------------------------------------------ settings of the server


def resolved(**settings: Any) -> dict[str, Any]:
    """A server whose configuration, as it was resolved, has these settings."""
    return {"resolved": {"hf_config": settings}}


OTHERS = cells(
    "sglang",
    "key",
    {
        "overridden-configuration": {"json_model_override_args": '{"rope_theta": 1e6}'},
        "overridden-configuration: resolved": resolved(rope_parameters={"rope_theta": 7.0}),
        "other-window": resolved(num_hidden_layers=2, max_position_embeddings=64),
        "computes-in-other-dtype": {"dtype": "float16"},
        "computes-in-other-dtype: resolved": {"resolved": {"dtype": torch.float16}},
        "quantization": {"quantization": "fp8"},
        "quantization: files": {"load_format": "bitsandbytes"},
        "weights-updated": {"weight_version": "2"},
        "picture-settings": {"mm_process_config": {"image": {"a": 1}}},
        "quantised-in-memory": {"quantize_and_serve": True},
        "hook-added": {"forward_hooks": [{"name": "steer"}]},
    },
)


@pytest.mark.parametrize("other", OTHERS)
def test_settings_that_change_keys_and_values_are_in_the_keys(stored, directory, other):
    plain = resolved(rope_parameters={"rope_theta": 10000.0, "type": "x"}, num_hidden_layers=2)
    before = stored.key(directory, **plain)
    assert stored.key(directory, **plain) == before != stored.key(directory, **{**plain, **other})


def test_settings_that_change_nothing_and_orders_are_not_in_the_keys(stored, directory):
    one, other = {"image": {"a": 1, "b": 2}}, {"image": {"b": 2, "a": 1}}
    neutral = {"quantization": None, "json_model_override_args": "{}", "dtype": "auto"}
    neutral |= {"served_model_name": "a name", "weight_version": "default"}
    before = stored.key(directory, mm_process_config=one)
    assert stored.key(directory, mm_process_config=other, **neutral) == before


def test_of_files_that_settings_name_the_content_is_in_the_keys(stored, directory, tmp_path):
    scales, moved = tmp_path / "scales.json", tmp_path / "moved.json"
    scales.write_text('{"k": 1}')
    moved.write_text('{"k": 1}')
    before = stored.key(directory, quantization_param_path=str(scales))
    assert stored.key(directory, quantization_param_path=str(moved)) == before
    scales.write_text('{"k": 2}')
    assert stored.key(directory, quantization_param_path=str(scales)) != before


@pytest.mark.planted("same-revision", "sglang", "key")
def test_a_revision_promises_weights_and_no_settings(stored, directory):
    named = {"model_revision": "org/name@1"}
    with serving(directory) as server:
        save(stored.open(directory, server, **named))
    put(directory, "model.safetensors", 2)
    with serving(directory, load_format="remote") as server:
        assert works(stored.open(directory, server, **named))
    refused = pytest.raises(ConfigurationError, match="load-format=dummy")
    with serving(directory, load_format="dummy") as server, refused:
        stored.open(directory, server, **named)
    with serving(directory, quantization="fp8") as server:
        assert stored.open(directory, server, **named).batch_exists(hashes(PAGES)) == 0
    put(directory, "config.json", CONFIG | {"rope_theta": 5.0})
    with serving(directory) as server:
        assert stored.open(directory, server, **named).batch_exists(hashes(PAGES)) == 0


@pytest.mark.planted("cache-dtype", "other-block-size", "sglang", "key")
def test_dtype_and_size_of_pages_are_in_the_keys(stored, directory):
    stored.save(directory)
    assert stored.found(directory, StandInPool("page_first", dtype=torch.bfloat16)) == 0
    larger = StandInPool("page_first")
    larger.page_size, larger.page_num = 2 * larger.page_size, larger.page_num // 2
    assert stored.found(directory, larger) == 0
    pool = StandInPool("page_first", dtype=torch.uint8)
    named = [stored.key(directory, pool, kv_cache_dtype=f"fp8_{one}") for one in ("e4m3", "e5m2")]
    assert named[0] != named[1]  # bytes of what, the server says


def refuse(stored: Stored, directory: Path, complaint: str, **settings: Any) -> None:
    """A server with these settings gets no storage."""
    with (
        serving(directory, **settings) as server,
        pytest.raises((ConfigurationError, UnsupportedModel), match=complaint),
    ):
        stored.open(directory, server)


def longest_of(config: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A server of a model with long factors, as the operator overrides its configuration."""
    return {"json_model_override_args": json.dumps(config), **settings}


NAME_THEM = "name them with model_revision"
LONGEST = "--context-length 4096 or less"
REFUSED = cells(
    "sglang",
    "refused",
    {
        "weights-from-elsewhere": ({"load_format": "dummy"}, "load-format=dummy"),
        "weights-from-elsewhere: remote": ({"load_format": "remote"}, "load-format='remote'"),
        "weights-from-elsewhere: path": ({"resolved": {"model_path": "/b"}}, "weights of '/b'"),
        "weights-from-elsewhere: part": (resolved(text_model_id="org/p"), "text_model_id=org/p"),
        "weights-from-elsewhere: presharded": ({"load_format": "presharded"}, NAME_THEM),
        "weights-from-elsewhere: cache": ({"weight_cache_mode": "client"}, NAME_THEM),
        "weights-from-elsewhere: processor": ({"kt_weight_path": "/other"}, NAME_THEM),
        "weights-from-elsewhere: restored": (
            {"modelopt_checkpoint_restore_path": "/other"},
            NAME_THEM,
        ),
        "weights-from-elsewhere: sent": (
            {"checkpoint_engine_wait_weights_before_ready": True},
            NAME_THEM,
        ),
        "long-factors": (longest_of(LONG), LONGEST),
        "long-factors: length": (longest_of(LONG, context_length=4097), LONGEST),
        "long-factors: part": (longest_of({"text_config": LONG}), LONGEST),
        "long-factors: shorter": (longest_of(LONG | {"max_position_embeddings": 8192}), LONGEST),
        "weights-from-elsewhere: adapter": (
            {"model_loader_extra_config": '{"qlora_adapter_name_or_path": "/adapter"}'},
            "another directory",
        ),
        "other-adapter": ({"enable_lora": True}, "enable-lora"),
        "no-adapter": ({"lora_paths": ["a=/adapters/a"]}, "enable-lora"),
        "other-picture": ({"resolved": {"is_multimodal": True}}, "language-model-only"),
        "prompt-embeddings": (
            {"disaggregation_decode_enable_offload_kvcache": True},
            "placeholder tokens",
        ),
        "bidirectional": (resolved(is_causal=False), "looks ahead"),
        "bidirectional: text": (
            resolved(text_config={"use_bidirectional_attention": True}),
            "looks ahead",
        ),
        "encoder-as-decoder": ({"dllm_algorithm": "LowConfidence"}, "looks ahead"),
    },
)


@pytest.mark.planted("adapter-switched adapter-weights-changed", "sglang", "refused")
@pytest.mark.planted(
    "picture-settings picture-uuid picture-uuid-like-hash sound-or-video", "sglang", "refused"
)
@pytest.mark.parametrize(("settings", "complaint"), REFUSED)
def test_servers_that_compute_what_keys_do_not_name_are_refused(
    stored, directory, settings, complaint
):
    refuse(stored, directory, complaint, **settings)


def test_a_length_up_to_which_no_long_factors_are_used_is_served(stored, directory):
    put(directory, "config.json", CONFIG | LONG)
    refuse(stored, directory, LONGEST)
    assert stored.key(directory, context_length=4096)
    with pytest.raises(UnsupportedModel, match="context-length=131072"):  # without a server
        KvConnectStorage(storage_config(directory, "memory:"), {})


def test_servers_that_could_take_pictures_and_take_none_are_served(stored, directory):
    assert stored.key(directory, resolved={"is_multimodal": False})


def test_code_and_weights_of_other_repositories_are_refused(stored, directory):
    put(directory, "config.json", CONFIG | {"auto_map": {"AutoModel": "org/x--modeling.Model"}})
    refuse(stored, directory, "auto_map: 'org/x--", trust_remote_code=True)
    put(directory, "config.json", CONFIG)
    with serving(directory) as server:
        model, own = server.worker.model_runner.model, SimpleNamespace(model_or_path=str(directory))
        model.secondary_weights = [own]
        stored.open(directory, server)
        model.secondary_weights = [own, SimpleNamespace(model_or_path="org/text-model")]
        with pytest.raises(ConfigurationError, match="another directory"):
            stored.open(directory, server)
        stored.open(directory, server, model_revision="org/name@1")


@pytest.mark.planted("forward-patched", "sglang", "refused")
def test_a_model_s_class_of_another_package_is_refused(stored, directory):
    class Patched(torch.nn.Module):
        __module__ = "plugin.models"

    with serving(directory) as server:
        server.worker.model_runner.model = Patched()
        with pytest.raises(ConfigurationError, match="package 'plugin"):
            stored.open(directory, server)
        stored.open(directory, server, model_revision="org/name@1")


def test_layers_of_an_encoder_are_refused(stored, directory):
    with serving(directory) as server:
        inner = server.worker.model_runner.model.inner
        inner.attn_type = SimpleNamespace(value="encoder_only")
        with pytest.raises(UnsupportedModel, match="looks ahead"):
            stored.open(directory, server)
        inner.attn_type = SimpleNamespace(value="decoder")
        stored.open(directory, server)


@pytest.mark.planted("other-rank-count", "sglang", "key")
def test_another_number_of_ranks_has_keys_of_its_own(stored, directory):
    with serving(directory) as server:
        assert save(stored.open(directory, server, StandInPool("page_first", heads=2)))
    for rank in range(2):
        with serving(directory) as server:
            pool = StandInPool("page_first", heads=1)
            storage = stored.open(directory, server, pool, tp_rank=rank, tp_size=2)
            assert storage.batch_exists(hashes(PAGES)) == 0
            assert not any(storage.batch_get_v1(hashes(PAGES), indices(range(PAGES))))


# ------------------------------------------------------------------ weights of a running server


def uncached() -> float:
    labels = (("reason", Doubt.WEIGHTS_CHANGED.value),)
    return metrics.by_labels().get(labels, {}).get("engine.request.uncached", 0)


@pytest.mark.planted("weights-reloaded", "weights-updated", "sglang", "refused")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("settings", [{}, {"enable_eplb": True}], ids=["watched", "moving"])
def test_replaced_weights_end_the_storage(stored, directory, way, settings):
    """Also where SGLang moves weights about, so that they are not watched."""
    with serving(directory, **settings) as server:
        storage = stored.open(directory, server)
        assert save(storage)
        assert works(storage)
        getattr(server.draft, way)()  # the draft model's keys and values are not stored
        assert works(storage)
        before = uncached()
        getattr(server.updater, way)()
        assert not works(storage)
        assert uncached() > before
        with pytest.raises(ConfigurationError, match="attached to a running server"):
            stored.open(directory, server, late=True)
        renamed = stored.open(directory, server, late=True, model_revision="org/name@2")
        assert renamed.batch_exists(hashes(PAGES)) == 0
        assert save(renamed)
        assert works(renamed)
        assert not works(storage)
    assert stored.found(directory) == PAGES  # a server with the old weights


@pytest.mark.parametrize("moving", [{"enable_eplb": True}, {"offload_group_size": 2}])
def test_weights_that_sglang_moves_by_itself_keep_the_storage(stored, directory, moving):
    with serving(directory, **moving) as server:
        storage = stored.open(directory, server)
        assert save(storage)
        server.worker.model_runner.model.load_weights()
        assert works(storage)


def replace_parameter(server: Server) -> None:
    inner = server.worker.model_runner.model.inner
    inner.weight = torch.nn.Parameter(inner.weight.detach().clone())
    gc.collect()


CHANGES = cells(
    "sglang",
    "refused",
    {
        "uncounted-write": lambda server: server.worker.model_runner.model.load_weights(),
        "storage-replaced": replace_parameter,
        "weights-updated: version": lambda server: server.context.settings.update(
            weight_version="2"
        ),
        "weights-updated: path": lambda server: server.context.settings.update(
            model_path="/elsewhere"
        ),
        "weights-updated: format": lambda server: server.context.settings.update(load_format="pt"),
    },
)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_weights_past_sglang_s_updates_ends_the_storage(stored, directory, change):
    with serving(directory, weight_version="default") as server:
        storage = stored.open(directory, server)
        assert save(storage)
        assert works(storage)
        change(server)
        assert not works(storage)


def released(server: Server, tags: list[str] | None) -> None:
    server.manager.release_memory_occupation(SimpleNamespace(tags=tags))


@pytest.mark.planted("paused", "sglang", "hit")
def test_pauses_that_keep_the_weights_keep_the_storage(stored, directory):
    with serving(directory, enable_memory_saver=True, enable_weights_cpu_backup=True) as server:
        server.SchedulerWeightUpdaterManager.memory_saver_adapter.enabled = True
        storage = stored.open(directory, server)
        assert save(storage)
        released(server, None)
        storage.clear()
        assert works(storage)
        buffers = server.worker.model_runner.model
        buffers.table.add_(1)  # SGLang writes buffers anew when it resumes
        assert works(storage)
    with serving(directory) as server:
        storage = stored.open(directory, server)
        released(server, None)  # has no effect without a memory saver
        buffers = server.worker.model_runner.model
        assert works(storage)
        buffers.table.add_(1)
        assert works(storage)


@pytest.mark.parametrize("tags", [None, ["kv_cache", "weights"]])
def test_weights_whose_memory_was_freed_without_a_copy_end_the_storage(stored, directory, tags):
    with serving(directory, enable_memory_saver=True) as server:
        server.SchedulerWeightUpdaterManager.memory_saver_adapter.enabled = True
        storage = stored.open(directory, server)
        assert save(storage)
        released(server, ["kv_cache"])
        assert works(storage)
        released(server, tags)
        assert not works(storage)


def test_a_storage_that_is_attached_again_before_any_update_works(stored, directory):
    with serving(directory) as server:
        save(stored.open(directory, server))
        stored.close()
        assert works(stored.open(directory, server, late=True))


def test_a_storage_of_a_running_server_needs_its_weights_named(stored, directory):
    with serving(directory) as server:
        with pytest.raises(ConfigurationError, match="attached to a running server"):
            stored.open(directory, server, late=True)
        server.scheduler.held = (64, 0)  # pages, perhaps of earlier weights
        with pytest.raises(ConfigurationError, match="flush its cache"):
            stored.open(directory, server, late=True, model_revision="org/name@1")
        server.scheduler.held = (0, 0)
        pool = StandInPool("page_first")
        pool.free -= 1
        with pytest.raises(ConfigurationError, match="flush its cache"):
            stored.open(directory, server, pool, late=True, model_revision="org/name@1")
        storage = stored.open(directory, server, late=True, model_revision="org/name@1")
        assert save(storage)
        assert works(storage)
        server.updater.update_weights_from_tensor()
        assert not works(storage)


@pytest.mark.planted("other-interface", "sglang", "refused")
def test_a_server_whose_weights_cannot_be_watched_is_refused(stored, directory):
    with serving(directory, hooks=False) as server:
        with pytest.raises(ConfigurationError, match="no hooks on updates"):
            stored.open(directory, server)
        stored.open(directory, server, model_revision="org/name@1")
    with serving(directory) as server:
        server.worker.model_runner.model = None
        with pytest.raises(ConfigurationError, match="cannot be watched"):
            stored.open(directory, server)
    with serving(directory) as server:
        registry = sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry
        path = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
        registry.patched.add(f"{path}.update_weights_from_ipc")  # by another plug-in
        with pytest.raises(ConfigurationError, match="no hooks on updates"):
            stored.open(directory, server)
