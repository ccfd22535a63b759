"""Planted identities inside TensorRT-LLM, with a stand-in for its runtime.

Requests that start anew, windows and the form of its interface are planted in
``tests/integrations/test_trtllm_main.py``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trtllm_interface as trt
from file_plants import file_plants, flip_byte
from model_directories import ALONE, CONFIG, make, tensors
from rows import cells
from trtllm_pair import Pair, T, a_prompt, forget_classes

from kvconnect.digest.doubts import Doubt
from kvconnect.errors import ConfigurationError, ModelChanged, UnsupportedModel
from kvconnect.integrations.core import models
from kvconnect.keys import BlockKey
from kvconnect.trace import metrics

PROMPT = a_prompt(3 * T + 1)
FOUND = 3 * T
REVISION = "org/name@1"
EARLIER = ["dff8450185b373e5fc475759", "7e852ee0db0423480cd550d4"]
"""Keys of the prompt's first block, without and with a salt, as release 0.1 made them."""


class Stored:
    """A store, and engines that run one after the other on it."""

    def __init__(self, classes: tuple[type, type], configure: Callable[..., None]) -> None:
        self._classes, self.configure = classes, configure

    def open(self, directory: Path, **arguments: Any) -> Pair:
        return Pair(self._classes, directory, **arguments)

    def save(self, directory: Path, request: trt.Request | None = None, **arguments: Any) -> None:
        """The prompt's blocks, of an engine with these arguments."""
        with self.open(directory, **arguments) as runtime:
            runtime.run(request or trt.Request(1, PROMPT), 1)

    def found(self, directory: Path, request: trt.Request | None = None, **arguments: Any) -> int:
        """How many of its tokens an engine with these arguments finds and has fetched."""
        with self.open(directory, **arguments) as runtime:
            asked = request or trt.Request(2, PROMPT)
            return runtime.scheduler.get_num_new_matched_tokens(asked, 0)[0]

    def keys(
        self, directory: Path, *salts: str | None, settings: dict[str, Any] | None = None
    ) -> list[BlockKey]:
        """The prompt's first key with each of `salts`, of an engine with these settings."""
        tokens = torch.tensor(PROMPT, dtype=torch.int32).numpy()
        self.configure(url="memory:?capacity=1MiB")
        with self.open(directory, **settings or {}) as runtime:
            maker = runtime.scheduler._attachment.maker
            return [
                maker.make(tokens, cache_salt=salt).block_keys()[0] for salt in salts or (None,)
            ]

    def refuses(self, directory: Path, complaint: str, **arguments: Any) -> None:
        with pytest.raises((ConfigurationError, UnsupportedModel), match=complaint):
            self._classes[0](trt.llm_args(directory, T, **arguments))


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stored]:
    def configure(**more: object) -> None:
        settings = {"url": f"disk://{tmp_path}/kv?capacity=64MiB", "lookup_timeout_ms": 60_000}
        settings["load_decisions"] = False
        monkeypatch.setenv("KVCONNECT_CONFIG", json.dumps(settings | more))

    forget_classes()
    import kvconnect.integrations.trtllm as room

    configure()
    yield Stored((room.KvConnectScheduler, room.KvConnectWorker), configure)
    forget_classes()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model's, with one loader's files."""
    return make(tmp_path / "model", ALONE["safetensors"])


# ------------------------------------------------------------------ the directory's files


def config(**changes: object) -> bytes:
    return json.dumps(CONFIG | changes).encode()


@pytest.mark.parametrize("plant", file_plants("trtllm", "key"))
def test_every_file_that_a_loader_may_read_is_in_the_keys(stored, directory, plant):
    plant.prepare(directory)
    before = stored.keys(directory)
    plant.change(directory)
    assert stored.keys(directory) != before


@pytest.mark.planted("weight-byte", "trtllm", "key")
def test_one_byte_of_the_weights_is_in_the_keys(stored, directory):
    stored.save(directory)
    assert stored.found(directory) == FOUND
    flip_byte(directory / "model.safetensors")
    assert stored.found(directory) == 0


@pytest.fixture
def started_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM's executor starts this process at this moment."""
    now = time.time_ns()
    monkeypatch.setattr(models, "process_started_ns", lambda: now)


@pytest.mark.planted("replaced-after-loading", "switched-while-loading", "trtllm", "refused")
def test_files_and_links_that_changed_since_the_process_started_are_refused(
    stored, directory, tmp_path, started_now
):
    stored.save(directory)
    link = tmp_path / "current"
    link.symlink_to(directory)
    with pytest.raises(ModelChanged, match="current"):
        stored.open(link)
    (directory / "model.safetensors").write_bytes(tensors("a", seed=7))
    with pytest.raises(ModelChanged, match="after this process"):
        stored.open(directory)


@pytest.mark.planted("files-alone", "trtllm", "hit")
def test_keys_are_those_of_earlier_releases(stored, directory):
    assert [key.hex()[:24] for key in stored.keys(directory, None, "tenant")] == EARLIER


# ------------------------------------------------------------------ the engine's settings


def cache(**more: object) -> dict[str, object]:
    """Arguments of an engine with these settings of its KV cache."""
    settings = {"tokens_per_block": T, "dtype": "auto", "enable_block_reuse": True} | more
    return {"kv_cache_config": SimpleNamespace(**settings)}


OTHERS = cells(
    "trtllm",
    "key",
    {
        "overridden-configuration": {"model_kwargs": {"rope_theta": 5.0}},
        "overridden-configuration: format": {"checkpoint_format": "mistral"},
        "computes-in-other-dtype": {"dtype": "float16"},
        "cache-dtype": cache(dtype="fp8"),
        "quantization": {"quant_config": "fp8"},
        "other-window": cache(max_attention_window=[64]),
        "long-factors": {"model_kwargs": {"rope_scaling": {"rope_type": "longrope"}}},
    },
)


@pytest.mark.parametrize("other", OTHERS)
def test_settings_that_change_keys_and_values_are_in_the_keys(stored, directory, other):
    before = stored.keys(directory)
    assert stored.keys(directory) == before != stored.keys(directory, settings=other)


@pytest.mark.planted("long-factors", "trtllm", "key")
@pytest.mark.parametrize("in_directory", [True, False])
def test_the_length_that_chooses_the_factors_of_longrope_is_in_the_keys(
    stored, directory, in_directory
):
    rope = {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 64}}
    arguments = {} if in_directory else {"model_kwargs": rope}
    if in_directory:
        (directory / "config.json").write_bytes(config(**rope))
    stored.save(directory, max_seq_len=32, **arguments)
    assert stored.found(directory, max_seq_len=32, **arguments) == FOUND
    assert stored.found(directory, max_seq_len=128, **arguments) == 0


@pytest.mark.planted("other-block-size", "trtllm", "key")
def test_blocks_of_another_size_are_not_found(stored, directory):
    stored.save(directory)
    assert stored.found(directory, **cache(tokens_per_block=2 * T)) == 0


@pytest.mark.planted("weights-from-elsewhere", "trtllm", "refused")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"load_format": "dummy"}, "load_format='dummy'"),
        ({"load_format": SimpleNamespace(name="GMS")}, "load_format=gms: .*model_revision"),
        ({"checkpoint_loader": object()}, "checkpoint_loader=object: .*model_revision"),
        ({"checkpoint_format": "MX"}, "checkpoint_format=mx: .*model_revision"),
        ({"trust_remote_code": True}, "auto_map: 'org/x--modeling.*model_revision"),
        ({"model_kwargs": {"text_model_id": "org/part"}}, "text_model_id=org/part: .*revision"),
    ],
)
def test_weights_and_code_from_elsewhere_are_refused(stored, directory, arguments, complaint):
    code = config(auto_map={"AutoModel": "org/x--modeling.Model"})
    (directory / "config.json").write_bytes(code)
    stored.refuses(directory, complaint, **arguments)
    stored.configure(model_revision=REVISION)
    if arguments != {"load_format": "dummy"}:  # which no name can stand for
        stored.save(directory, **arguments)
        assert stored.found(directory, **arguments) == FOUND


@pytest.mark.planted(
    "weights-reloaded weights-updated storage-replaced uncounted-write paused", "trtllm", "refused"
)
@pytest.mark.parametrize("settings", [{}, {"model_revision": REVISION}])
def test_what_can_replace_the_weights_of_a_running_engine_is_refused(stored, directory, settings):
    """Updates, sleep and wake-up are methods of an extension of its workers."""
    stored.configure(**settings)
    extension = "tensorrt_llm.llmapi.rlhf_utils.WorkerExtension"
    stored.refuses(
        directory,
        f"ray_worker_extension_cls='{extension}': its methods can replace the weights",
        ray_worker_extension_cls=extension,
    )


@pytest.mark.planted("same-revision", "trtllm", "key")
def test_a_revision_promises_weights_and_no_settings(stored, directory):
    stored.configure(model_revision=REVISION)
    stored.save(directory)
    (directory / "model.safetensors").write_bytes(tensors("a", seed=7))
    assert stored.found(directory) == FOUND
    assert stored.found(directory, model_kwargs={"rope_theta": 5.0}) == 0
    (directory / "config.json").write_bytes(config(rope_theta=5.0))
    assert stored.found(directory) == 0


@pytest.mark.planted("dynamic-rope", "trtllm", "refused")
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("in_directory", [True, False])
def test_rope_that_depends_on_the_length_is_refused(stored, directory, place, in_directory):
    rope = {place: {"rope_type": "dynamic", "factor": 2.0}}
    if in_directory:
        (directory / "config.json").write_bytes(config(text_config=rope))
    arguments = {} if in_directory else {"model_kwargs": rope}
    stored.refuses(directory, "rope_scaling: with RoPE of kind 'dynamic'", **arguments)


@pytest.mark.planted("rank-share", "other-rank-count", "trtllm", "refused")
@pytest.mark.parametrize(
    "name", ["tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"]
)
def test_several_ranks_are_refused(stored, directory, name):
    stored.refuses(directory, f"{name}=2: .* one rank", **{name: 2})


# ------------------------------------------------------------------ what comes with a request


UNTOLD = cells(
    "trtllm",
    "refused",
    {
        "other-picture": {"multimodal_hashes": [[1] * 8]},
        "picture-settings": {"multimodal_positions": [3]},
        "picture-uuid": {"multimodal_uuids": ["mine"]},
        "picture-uuid-like-hash": {"multimodal_uuids": ["0" * 64]},
        "sound-or-video": {"py_multimodal_data": {"audio": {}}},
        "prompt-embeddings": {"prompt_embedding_table": object()},
        "other-adapter": {"lora_task_id": 3},
    },
)


@pytest.mark.parametrize("more", UNTOLD)
def test_inputs_that_tokens_do_not_tell_are_neither_saved_nor_loaded(stored, directory, more):
    before = uncached(Doubt.UNKNOWN_INPUT)
    stored.configure(url="memory:?capacity=1MiB")
    with stored.open(directory) as runtime:

        def computed(number: int, **given: Any) -> int:
            tokens = runtime.run(trt.Request(number, PROMPT, **given), 1)
            assert runtime.worker._attachment._access.flush(60)
            return tokens

        assert [computed(1, **more), computed(2), computed(3)] == [len(PROMPT)] * 2 + [1]
        assert computed(4, **more) == len(PROMPT)
    assert uncached(Doubt.UNKNOWN_INPUT) == before + 2


@pytest.mark.planted("no-adapter", "trtllm", "hit")
def test_a_request_without_an_adapter_is_cached_where_others_have_one(stored, directory):
    with stored.open(directory) as runtime:
        runtime.run(trt.Request(1, PROMPT, lora_task_id=3), 1)
        runtime.run(trt.Request(2, PROMPT), 1)
        runtime.run(trt.Request(3, PROMPT, lora_task_id=4), 1)
    assert stored.found(directory, trt.Request(4, PROMPT, lora_task_id=None)) == FOUND


def uncached(doubt: Doubt) -> float:
    """Requests that were not cached for this reason."""
    labels = (("reason", doubt.value),)
    return metrics.by_labels().get(labels, {}).get("engine.request.uncached", 0)


@pytest.mark.planted("other-salt", "long-salt", "trtllm", "key")
def test_salts_of_any_length_keep_requests_apart(stored, directory):
    long = "tenant" * 50_000
    for salt in ("a", f"{long}a"):
        stored.save(directory, trt.Request(1, PROMPT, cache_salt=salt))
    for salt, tokens in {"a": FOUND, f"{long}a": FOUND, f"{long}b": 0, "b": 0, None: 0}.items():
        assert stored.found(directory, trt.Request(2, PROMPT, cache_salt=salt)) == tokens
    before = uncached(Doubt.BAD_SALT)
    assert stored.found(directory, trt.Request(2, PROMPT, cache_salt="")) == 0
    assert uncached(Doubt.BAD_SALT) == before + 1
