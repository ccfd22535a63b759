"""Defines a check of the conformance kit: an async function whose docstring is its demand."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvconnect.testing.subject import Subject

Body: TypeAlias = Callable[[Subject], Awaitable[None]]
Result = Literal["passed", "failed", "skipped"]

registered: list[Check] = []
"""The checks whose modules were imported, in that order; `checks.all_checks` has all of them."""


class Violation(AssertionError):
    """The error of a backend that does not meet the demand of a check."""


@dataclass(frozen=True, slots=True)
class Check:
    """A demand on a backend.

    Attributes:
        group: the part of the contract that it belongs to.
        name: its name within the group.
        demands: the demand in one sentence.
        body: the function; raises `Violation` if the subject fails, `Unsupported` if the check does
            not apply.
        limit_s: seconds after which it counts as hanging.
        needs_root: true if it mounts file systems.
    """

    group: str
    name: str
    demands: str
    body: Body
    limit_s: float
    needs_root: bool = False

    @property
    def id(self) -> str:
        """The id ``group.name``."""
        return f"{self.group}.{self.name}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a check.

    Attributes:
        reason: the reason of a failure or a skip; else empty.
        error: the exception of a failure.
    """

    check: Check
    result: Result
    reason: str = ""
    seconds: float = 0.0
    error: BaseException | None = None


def check(group: str, *, limit_s: float = 30.0, needs_root: bool = False) -> Callable[[Body], Body]:
    """Registers an async function of a `Subject`; its docstring's first sentence is shown."""

    def register(body: Body) -> Body:
        name = getattr(body, "__name__", "")
        text = " ".join((inspect.getdoc(body) or "").split("\n\n", maxsplit=1)[0].split())
        registered.append(Check(group, name, text, body, limit_s, needs_root))
        return body

    return register


def demand(condition: object, message: str) -> None:
    """Raises unless `condition` holds.

    Raises:
        Violation: with `message`, which describes what the backend did.
    """
    if not condition:
        raise Violation(message)
