"""Our classes fit the interfaces of other engines, as those were recorded; no engine is needed.

`make test-engines` checks the recorded data against the engines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module

import pytest
from recorded_interfaces import Interface, interfaces, misfits

ADAPTERS = [
    ("kvconnect.integrations.vllm_tier", "KvConnectTier", "vllm", ("SecondaryTierManager",)),
]
"""Module and name of a class of ours, the engine, and the classes of its that it must do for."""


@pytest.fixture
def stood_in(request) -> Iterator[Interface]:
    """The engine's modules are answered with what was recorded, while a test runs."""
    interface: Interface = request.param
    made = interface.stand_in()
    yield interface
    for name in made:
        del sys.modules[name]


def imported_anew(module: str, name: str, monkeypatch) -> type:
    """The class, from modules that see the stand-ins."""
    for loaded in [one for one in sys.modules if f"{one}.".startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    found = getattr(import_module(module), name)
    for loaded in [one for one in sys.modules if f"{one}.".startswith(f"{module}.")]:
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
