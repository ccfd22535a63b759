"""Runs a test in a process of its own.

A test that counts descriptors, threads or objects, or that measures memory or processor time, would
count those of the tests before it as well: they come and go while it runs.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import multiprocessing
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

_CONTEXT = multiprocessing.get_context("forkserver")


def own_process(test: Callable[..., object]) -> Callable[..., None]:
    """Makes `test`, a function of a module, run in a process that imports this module anew.

    Its arguments are pickled: of the fixtures, only values and paths can be used.
    """

    @functools.wraps(test)
    def run(**arguments: object) -> None:
        heard, told = _CONTEXT.Pipe(duplex=False)
        where = (inspect.getfile(test), test.__name__)
        child = _CONTEXT.Process(target=_run, args=(told, *where, arguments))
        child.start()
        told.close()
        try:
            failure = heard.recv()
            child.join()
        except EOFError:
            child.join()
            failure = f"the process of the test ended early: {child.exitcode}"
        finally:
            child.kill()
            heard.close()
        if failure:
            pytest.fail(failure, pytrace=False)

    return run


def _run(told: Connection, file: str, name: str, arguments: dict[str, object]) -> None:
    failure = ""
    try:
        test = inspect.unwrap(getattr(_module(file), name))
        result = test(**arguments)
        if inspect.iscoroutine(result):
            asyncio.run(result)
    except BaseException:  # noqa: BLE001 - whatever it is, the test fails with it
        failure = traceback.format_exc()
    told.send(failure)


def _module(file: str) -> object:
    name = f"own_process_{Path(file).stem}"  # runners import test modules by their paths, too
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
