"""The decorators for keyword arguments: take those of a record, refuse unknown ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from kvconnect.errors import ConfigurationError, nearest

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def known_keywords(method: Callable[P, R]) -> Callable[P, R]:
    """Makes `method` refuse unknown keyword arguments with an error that names the nearest one.

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


def takes(
    record: Callable[P, R],
) -> Callable[[Callable[[S, R], None]], Callable[Concatenate[S, P], None]]:
    """Decorates a constructor with one argument `record`: it accepts the record's arguments.

    So they are listed once, for readers, type checkers and `help` alike. Unknown ones are refused
    as by `known_keywords`.
    """

    def decorate(init: Callable[[S, R], None]) -> Callable[Concatenate[S, P], None]:
        @wraps(init)
        def taking(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, record(*args, **kwargs))

        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = inspect.signature(record).parameters.values()
        vars(taking)["__signature__"] = inspect.Signature([itself, *parameters])
        return known_keywords(taking)

    return decorate
