"""Other engines' interfaces, as `interfaces/record.py` wrote them down; how a class fits them."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import runpy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).with_name("interfaces")

Parameter = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Interface:
    """What one version of an engine has: its classes by ``module:Class``, each as recorded."""

    engine: str
    version: str
    classes: dict[str, dict[str, Any]]

    @cached_property
    def by_name(self) -> dict[str, dict[str, Any]]:
        return {name.partition(":")[2]: cls for name, cls in self.classes.items()}

    def methods(self, *names: str) -> dict[str, dict[str, Any]]:
        """Those of all the classes `names` together."""
        return {key: one for name in names for key, one in self.by_name[name]["methods"].items()}

    def abstract(self, *names: str) -> set[str]:
        return {one for name in names for one in self.by_name[name]["abstract"]}

    def stand_in(self) -> list[str]:
        """Import of the engine's modules gives classes made of the data; returns their names.

        Abstract methods are abstract, other methods refuse to be called, fields and members are
        there: enough to subclass, and to find a name that the engine does not have.
        """
        modules: list[str] = []
        for name, recorded in self.classes.items():
            module, _, attribute = name.partition(":")
            parts = module.split(".")
            for end in range(1, len(parts) + 1):
                whole = ".".join(parts[:end])
                if whole not in sys.modules:
                    made = sys.modules[whole] = ModuleType(whole, "a stand-in, made by a test")
                    made.__path__ = []
                    made.__spec__ = ModuleSpec(whole, None, is_package=True)
                    modules.append(whole)
                    if end > 1:
                        setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], made)
            setattr(sys.modules[module], attribute, _class(attribute, module, recorded))
        return modules

    def made(self, name: str) -> Any:
        """The class `name` of the stand-in."""
        whole = next(one for one in self.classes if one.endswith(f":{name}"))
        return getattr(sys.modules[whole.partition(":")[0]], name)


def interfaces(engine: str) -> list[Interface]:
    """All recorded versions of `engine`, the oldest first."""
    files = sorted(FOLDER.glob(f"{engine}-*.json"))
    return [Interface(**json.loads(file.read_text(encoding="utf-8"))) for file in files]


def check_recorded(engine: str) -> None:
    """What was recorded is what the installed `engine` has."""
    record = runpy.run_path(str(FOLDER / "record.py"))
    here = record["interface"](engine)
    file = FOLDER / f"{engine}-{here['version']}.json"
    assert file.exists(), f"python {FOLDER.name}/record.py {engine} writes it"
    assert json.loads(file.read_text("utf-8")) == json.loads(record["written"](here))


def misfits(cls: type, interface: Interface, *names: str) -> list[str]:
    """What of `cls` does not do for the engine's classes `names`; one sentence each.

    Every call that the recorded parameters allow must be possible, and nothing abstract be left.
    """
    found = [
        f"{name} is missing" for name in sorted(interface.abstract(*names)) if not _own(cls, name)
    ]
    for name, recorded in interface.methods(*names).items():
        value = _own(cls, name)
        if value is None:
            continue
        if recorded["kind"] != (kind := _kind(value)):
            found.append(f"{name} is a {kind}, not a {recorded['kind']}")
        elif kind != "property":
            function = getattr(value, "__func__", value)
            parameters = list(inspect.signature(function).parameters.values())
            own = parameters if kind == "staticmethod" else parameters[1:]
            found += [f"{name}: {why}" for why in _misfits(own, recorded["parameters"])]
    return found


def _own(cls: type, name: str) -> Any:
    """What a class of ours has under `name`; what the engine's base gives does not count."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in {"vllm", "sglang", "builtins", "abc"}:
            continue
        if name in vars(base):
            return vars(base)[name]
    return None


def _kind(value: object) -> str:
    if isinstance(value, property):
        return "property"
    kinds = {classmethod: "classmethod", staticmethod: "staticmethod"}
    return kinds.get(type(value), "method")


def _misfits(own: list[inspect.Parameter], recorded: list[Parameter]) -> list[str]:
    kinds = inspect.Parameter
    rest = any(one.kind is kinds.VAR_POSITIONAL for one in own)
    keywords = any(one.kind is kinds.VAR_KEYWORD for one in own)
    by_name = {one.name: one for one in own}
    positional = [
        one for one in own if one.kind in {kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD}
    ]
    found = []
    for number, wanted in enumerate(recorded):
        name, kind = wanted["name"], wanted["kind"]
        if kind in {"VAR_POSITIONAL", "VAR_KEYWORD"}:
            if not (rest if kind == "VAR_POSITIONAL" else keywords):
                found.append(f"{name} is not taken")
        elif kind == "KEYWORD_ONLY":
            if name not in by_name and not keywords:
                found.append(f"{name} is not taken")
        elif number < len(positional):
            if positional[number].name != name:
                found.append(f"{positional[number].name} stands where {name} is passed")
        elif not rest:
            found.append(f"{name} is not taken")
        if name in by_name and "default" in wanted and by_name[name].default is kinds.empty:
            found.append(f"{name} must have a default")
    known = {one["name"] for one in recorded}
    variable = {kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD}
    found += [
        f"{one.name} is never passed"
        for one in own
        if one.name not in known and one.kind not in variable and one.default is kinds.empty
    ]
    return found


def _class(name: str, module: str, recorded: dict[str, Any]) -> type:
    body = {key: _method(key, one, recorded) for key, one in recorded.get("methods", {}).items()}
    if "members" in recorded:
        made: type = enum.Enum(name, recorded["members"])  # type: ignore[assignment]
    elif "fields" in recorded:
        # Required ones first: the engine's own order is that, or a dataclass would not be possible.
        made = dataclasses.make_dataclass(
            name,
            [
                (field, Any, dataclasses.field(default=None)) if optional else (field, Any)
                for field, optional in recorded["fields"].items()
            ],
            namespace=body,
        )
    else:
        made = type(ABC)(name, (ABC,), body)
    made.__module__ = module
    return made


def _method(name: str, one: dict[str, Any], recorded: dict[str, Any]) -> Any:
    def refuse(self: object, *args: object, **kwargs: object) -> Any:
        if name == "__init__":
            return None
        raise NotImplementedError(name)

    refuse.__name__ = name
    made: Callable[..., Any] = abstractmethod(refuse) if name in recorded["abstract"] else refuse
    wrap = {"property": property, "classmethod": classmethod, "staticmethod": staticmethod}
    return wrap.get(one["kind"], lambda method: method)(made)
