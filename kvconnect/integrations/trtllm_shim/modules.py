"""The table of TensorRT-LLM's names and of kvconnect's modules for them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from kvconnect.engine.ranks.preparation import in_followers
from kvconnect.errors import ConfigurationError

_ROOT = "tensorrt_llm"
_HERE = "kvconnect.integrations.trtllm_shim"

_CONNECTOR = {
    "KvCacheConnectorScheduler": "kvconnect.connector.scheduler",
    "KvCacheConnectorWorker": "kvconnect.connector.worker",
    "RequestData": "kvconnect.connector.data",
    "SchedulerOutput": "kvconnect.connector.data",
    "LlmRequest": "kvconnect.request",
}
_SETTINGS = dict.fromkeys(
    (
        *("CapacitySchedulerPolicy", "KvCacheConfig", "KvCacheConnectorConfig"),
        *("SchedulerConfig", "TorchLlmArgs", "LlmArgs"),
    ),
    f"{_HERE}.settings",
)
_RETENTION = {
    "KvCacheRetentionConfig": "kvconnect.config",
    "KvCacheTransferMode": f"{_HERE}.settings",
}
_PROCESS = {"mpi_rank": f"{_HERE}.process", "mpi_world_size": f"{_HERE}.process"}
_LOG = {"logger": f"{_HERE}.process"}
_SAMPLING = {"SamplingParams": f"{_HERE}.sampling_params"}
_API = {
    "LLM": f"{_HERE}.llm",
    "CompletionOutput": f"{_HERE}.output",
    "RequestOutput": f"{_HERE}.output",
    **_SAMPLING,
    **_RETENTION,
    **{name: _SETTINGS[name] for name in _SETTINGS if name != "LlmArgs"},
}
_MAPPING = {"Mapping": "kvconnect.connector.parallel"}
_EXECUTOR = f"{_ROOT}._torch.pyexecutor"
_REFUSED = (
    *("KvCacheLayout", "KvCacheLayerGroupLayout", "KvCacheRegion", "KvCacheBufferRef"),
    "build_kv_cache_layout_v2",
)
"""Names of ``kv_cache_layout`` that cannot be answered."""

MODULES: Mapping[str, Mapping[str, str]] = {
    _ROOT: {
        "LLM": _API["LLM"],
        "LlmArgs": _SETTINGS["LlmArgs"],
        "TorchLlmArgs": _SETTINGS["TorchLlmArgs"],
        "__version__": f"{_HERE}.process",
        **_MAPPING,
        **_SAMPLING,
        **_PROCESS,
        **_LOG,
    },
    f"{_ROOT}._torch": {},
    _EXECUTOR: {},
    f"{_EXECUTOR}.kv_cache_connector": _CONNECTOR,
    f"{_EXECUTOR}.connectors": {},
    f"{_EXECUTOR}.connectors.kv_cache_connector": _CONNECTOR,
    f"{_EXECUTOR}.connectors.kv_cache_layout": {"valid_page_slots": f"{_HERE}.process"},
    f"{_EXECUTOR}.llm_request": {"LlmRequest": _CONNECTOR["LlmRequest"]},
    f"{_EXECUTOR}.resource_manager": {
        "BaseResourceManager": "kvconnect.cache.resource_manager",
        "KVCacheManager": "kvconnect.cache.kv_cache_manager",
    },
    f"{_ROOT}._utils": _PROCESS,
    f"{_ROOT}.bindings": {},
    f"{_ROOT}.bindings.executor": {**_RETENTION, "ExecutorConfig": _SETTINGS["TorchLlmArgs"]},
    f"{_ROOT}.bindings.internal": {},
    f"{_ROOT}.bindings.internal.batch_manager": {"LlmRequest": _CONNECTOR["LlmRequest"]},
    f"{_ROOT}.llmapi": _API,
    f"{_ROOT}.llmapi.llm": _API,
    f"{_ROOT}.llmapi.llm_args": {**_SETTINGS, **_RETENTION},
    f"{_ROOT}.logger": _LOG,
    f"{_ROOT}.mapping": _MAPPING,
    f"{_ROOT}.sampling_params": _SAMPLING,
}
"""For each module its names, and the module of kvconnect that has each."""

_installing = threading.Lock()


class ShimModule(ModuleType):
    """A module of TensorRT-LLM's name with kvconnect's classes, which are imported on access.

    Its sub-modules are those in ``sys.modules``; others are not found, as in any package.
    """

    def __init__(self, name: str, contents: Mapping[str, str]) -> None:
        super().__init__(name, f"{name}, answered by {_HERE}.")
        self.__spec__ = ModuleSpec(name, loader=None, origin=_HERE, is_package=True)
        self.__path__: list[str] = []
        self.__all__ = sorted(contents)
        self._contents = contents

    def __getattr__(self, name: str) -> Any:
        where = self._contents.get(name)
        if name in _REFUSED and self.__name__.endswith(".kv_cache_layout"):
            raise ConfigurationError(
                f"{self.__name__}.{name}: describes TensorRT-LLM's second cache manager by regions "
                "of memory; kvconnect's engine has one tensor for each pool group: override "
                "register_kv_caches, or register_kv_cache_layout of "
                "kvconnect.KvCacheConnectorWorker"
            )
        if where is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} in {_HERE}")
        found = getattr(import_module(where), name)
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


def install() -> None:
    """Makes imports of ``tensorrt_llm`` return kvconnect's modules from now on. Idempotent.

    Affects this process, and the processes of ranks that its engines start.

    Raises:
        ConfigurationError: TensorRT-LLM itself is installed, or something else of its name is
            imported already. Nothing changed.
    """
    with _installing:
        present = sys.modules.get(_ROOT)
        if isinstance(present, ShimModule):
            return
        where = getattr(present, "__file__", None) if present else _installed()
        if present is not None or where is not None:
            raise ConfigurationError(
                f"tensorrt_llm is installed ({where}), and the shim would hide it; use it as it "
                "is, or run in an environment without it"
            )
        for name, contents in MODULES.items():
            sys.modules[name] = module = ShimModule(name, contents)
            parent, _, child = name.rpartition(".")
            # `tensorrt_llm.logger` is the logger, as in TensorRT-LLM, and the module is imported
            # by its whole name.
            if parent and child not in MODULES[parent]:
                setattr(sys.modules[parent], child, module)
        in_followers(f"{_HERE}:install")


def _installed() -> str | None:
    """Returns the location of an installed TensorRT-LLM, or ``None``."""
    spec = find_spec(_ROOT)
    if spec is None:
        return None
    return spec.origin or ", ".join(spec.submodule_search_locations or ()) or _ROOT
