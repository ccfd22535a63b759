"""Encodes a subject as bytes, for a child process of the kit."""

from __future__ import annotations

import inspect
import io
import pickle
import sys
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import FunctionType, MethodType, NoneType
from typing import Any

from kvconnect.testing.subject import Address, Subject, Unsupported

_importing: list[str] = []
"""The files that this process imports for a subject."""


class Unguarded(Exception):
    """The error of a script that runs the kit when it is imported."""


_CALLED = (partial, MethodType)  # refused alone, and around names of a module
_CARRIED = (str, int, float, NoneType, Path, Address, FunctionType, type)


def pack(subject: Subject) -> bytes:
    """Encodes `subject` for `unpack`: its class, and those attributes that are plain values.

    Plain values are strings, numbers, paths, addresses, and names at the top of a module.

    Raises:
        Unsupported: a class or function of the subject is defined inside a function, or is a
            lambda, a bound method or a `functools.partial`.
    """
    for value in vars(subject).values():
        if isinstance(value, _CALLED):
            raise _not_importable(f"a {'partial' if isinstance(value, partial) else 'method'}")
    state = {name: value for name, value in vars(subject).items() if isinstance(value, _CARRIED)}
    packed = io.BytesIO()
    _Pickler(packed).dump((type(subject), state))
    return packed.getvalue()


def unpack(packed: bytes) -> Subject:
    """Returns the subject in this process, which imports the modules that it needs."""
    kind, state = pickle.loads(packed)  # noqa: S301 - the parent process packed it
    subject: Subject = object.__new__(kind)
    vars(subject).update(state)
    return subject


class _Pickler(pickle.Pickler):
    """Pickles classes and functions with their files: test runners import modules by path."""

    def reducer_override(self, obj: Any) -> Any:
        if obj is _named or not isinstance(obj, type | FunctionType):
            return NotImplemented
        if "<" in obj.__qualname__:
            raise _not_importable(obj.__qualname__)
        return _named, (obj.__module__, inspect.getfile(obj), obj.__qualname__)


def _not_importable(name: str) -> Unsupported:
    return Unsupported(
        f"a child process cannot import {name}: "
        "give a function at the top of a module, or a Subject"
    )


def refuse_while_imported() -> None:
    """Refuses to run checks while a child process imports the script that runs them.

    Raises:
        Unguarded: the script has no guard: each of its child processes would run it again, and
            start more of them.
    """
    if _importing:
        raise Unguarded(
            f"{_importing[-1]} runs the kit when it is imported, as child processes do: "
            "put that under if __name__ == '__main__'"
        )


def _named(module: str, file: str, name: str) -> Any:
    return attrgetter(name)(_module(module, file))


@cache
def _module(name: str, file: str) -> Any:
    if name == "__main__":  # the parent's script, which must not run here
        name = "__kvconnect_main__"
    with suppress(ImportError):
        _importing.append(file)
        try:
            module = import_module(name)
        finally:
            _importing.pop()
        if getattr(module, "__file__", None) == file:
            return module
    # A script, or a test module, which its runner imported by its path.
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {file}")
    module = module_from_spec(spec)
    sys.modules[name] = module
    _importing.append(file)
    try:
        spec.loader.exec_module(module)
    finally:
        _importing.pop()
    return module
