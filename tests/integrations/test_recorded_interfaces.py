"""Our classes fit the interfaces of other engines, as those were recorded; no engine is needed.

`make test-engines` checks the recorded data against the engines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module

import pytest
from recorded_interfaces import Interface, interfaces, misfits

_VLLM, _SGLANG = "kvconnect.integrations.vllm", "kvconnect.integrations.sglang"

ADAPTERS = [
    (_VLLM, "KvConnect", "vllm", ("KVConnectorBase_V1", "SupportsHMA")),
    (f"{_VLLM}.exports", "KvConnectStats", "vllm", ("KVConnectorStats",)),
    (f"{_VLLM}.exports", "KvConnectPromMetrics", "vllm", ("KVConnectorPromMetrics",)),
    ("kvconnect.integrations.vllm_tier", "KvConnectTier", "vllm", ("SecondaryTierManager",)),
    (_SGLANG, "KvConnectStorage", "sglang", ("HiCacheStorage",)),
]
"""Module and name of a class of ours, the engine, and the classes of its that it must do for."""


@pytest.fixture
def stood_in(request) -> Iterator[Interface]:
    """Stand-ins for the engine's modules, made of what was recorded, while a test runs.

    vLLM's factory takes the name of our class, as its module registers it when it is imported, and
    does nothing with it.
    """
    interface: Interface = request.param
    made = interface.stand_in()
    if interface.engine == "vllm":
        factory = interface.made("KVConnectorFactory")
        factory.register_connector = classmethod(lambda cls, name, module_path, class_name: None)
    yield interface
    for name in made:
        del sys.modules[name]


def imported_anew(module: str, name: str, monkeypatch) -> type:
    """The class, from modules that see the stand-ins."""
    package = ".".join(module.split(".")[:3])
    parent, _, child = package.rpartition(".")
    monkeypatch.setattr(import_module(parent), child, import_module(package))
    for loaded in [one for one in sys.modules if f"{one}.".startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    found = getattr(import_module(module), name)
    for loaded in [one for one in sys.modules if f"{one}.".startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    assert isinstance(found, type)
    return found


@pytest.mark.parametrize(
    ("stood_in", "module", "name", "bases"),
    [
        pytest.param(interface, module, name, bases, id=f"{name}-{engine}-{interface.version}")
        for module, name, engine, bases in ADAPTERS
        for interface in interfaces(engine)
    ],
    indirect=["stood_in"],
)
def test_our_class_does_for_the_engine_s(stood_in, module, name, bases, monkeypatch):
    cls = imported_anew(module, name, monkeypatch)
    assert misfits(cls, stood_in, *bases) == []
    engine = stood_in.engine
    theirs = {
        getattr(base, "__name__", "") for base in cls.__mro__ if base.__module__.startswith(engine)
    }
    assert theirs >= set(bases)
    assert not getattr(cls, "__abstractmethods__", None)


@pytest.mark.parametrize(
    "stood_in", [pytest.param(one, id=one.version) for one in interfaces("vllm")], indirect=True
)
def test_vllm_is_told_that_dropped_saves_are_harmless_and_layers_need_no_hooks(
    stood_in, monkeypatch
):
    cls = imported_anew(_VLLM, "KvConnect", monkeypatch)
    assert cls.requires_kv_delivery.fget(object.__new__(cls)) is False
    assert cls.requires_piecewise_for_cudagraph({}) is False
    methods = stood_in.methods("KVConnectorBase_V1")
    assert methods["requires_kv_delivery"]["kind"] == "property"
    assert methods["requires_piecewise_for_cudagraph"]["kind"] == "classmethod"


RECORDED = Interface(
    engine="vllm",
    version="0",
    classes={
        "vllm.m:Base": {
            "abstract": ["load"],
            "methods": {
                "load": {
                    "kind": "method",
                    "parameters": [
                        {"name": "key", "kind": "POSITIONAL_OR_KEYWORD"},
                        {"name": "wait", "kind": "POSITIONAL_OR_KEYWORD", "default": "None"},
                    ],
                },
                "layout": {"kind": "classmethod", "parameters": []},
                "size": {"kind": "property"},
                "more": {
                    "kind": "method",
                    "parameters": [{"name": "kwargs", "kind": "VAR_KEYWORD"}],
                },
            },
        }
    },
)


def class_of(**members: object) -> type:
    return type("Ours", (), {"__module__": "ours", **members})


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({}, "load is missing"),
        ({"load": lambda self, key: 0}, "load: wait is not taken"),
        ({"load": lambda self, name, wait=None: 0}, "load: name stands where key is passed"),
        ({"load": lambda self, key, wait: 0}, "load: wait must have a default"),
        ({"load": lambda self, key, wait=None, *, x: 0}, "load: x is never passed"),
        ({"load": staticmethod(lambda key, wait=None: 0)}, "load is a staticmethod, not a method"),
        (
            {"load": lambda self, key, wait=None: 0, "layout": lambda self: 0},
            "layout is a method, not a classmethod",
        ),
        (
            {"load": lambda self, key, wait=None: 0, "size": lambda self: 0},
            "size is a method, not a property",
        ),
        (
            {"load": lambda self, key, wait=None: 0, "more": lambda self: 0},
            "more: kwargs is not taken",
        ),
    ],
)
def test_what_does_not_fit_is_found(members, why):
    assert why in misfits(class_of(**members), RECORDED, "Base")


def test_what_fits_is_not_found():
    members = {
        "load": lambda self, key, wait=1, other=2: 0,
        "layout": classmethod(lambda cls: 0),
        "size": property(lambda self: 0),
        "more": lambda self, **kwargs: 0,
        "own": lambda self, anything: 0,
    }
    assert misfits(class_of(**members), RECORDED, "Base") == []
    assert misfits(class_of(load=lambda self, *args: 0), RECORDED, "Base") == []
