"""Keyword arguments that a method does not know."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from kvconnect.errors import ConfigurationError, nearest

__all__ = ["known_keywords"]

P = ParamSpec("P")
R = TypeVar("R")


def known_keywords(method: Callable[P, R]) -> Callable[P, R]:
    """`method`, refusing unknown keyword arguments by an error that names the nearest one.

    The method then raises `ConfigurationError` where Python raises ``TypeError``.
    """
    known = [name for name in inspect.signature(method).parameters if name != "self"]
    expected = frozenset(known)

    @wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - expected:
            raise ConfigurationError(
                f"{type(args[0]).__name__}.{method.__name__}: unknown argument '{name}'; "
                f"{nearest(name, known)}"
            )
        return method(*args, **kwargs)

    return checked
