"""What a check of the conformance kit is: an async function that says what it demands."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvconnect.testing.subject import Subject

__all__ = ["Check", "Outcome", "Result", "Violation", "check", "demand", "registered"]

Body: TypeAlias = Callable[[Subject], Awaitable[None]]
Result = Literal["passed", "failed", "skipped"]

registered: list[Check] = []
"""The checks whose modules were imported, in that order; `checks.all_checks` has all of them."""


class Violation(AssertionError):
    """A backend does not do what a check demands."""


@dataclass(frozen=True, slots=True)
class Check:
    """One demand on a backend.

    Attributes:
        group: which part of the contract it belongs to.
        name: within its group.
        demands: what it demands, in one sentence.
        body: raises `Violation` if the subject fails, `Unsupported` if it cannot be asked.
        limit_s: seconds after which it counts as hanging.
        needs_root: it mounts file systems.
    """

    group: str
    name: str
    demands: str
    body: Body
    limit_s: float
    needs_root: bool = False

    @property
    def id(self) -> str:
        """``group.name``."""
        return f"{self.group}.{self.name}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a check ended.

    Attributes:
        reason: of a failure or a skip; else empty.
        error: what was raised, of a failure.
    """

    check: Check
    result: Result
    reason: str = ""
    seconds: float = 0.0
    error: BaseException | None = None


def check(group: str, *, limit_s: float = 30.0, needs_root: bool = False) -> Callable[[Body], Body]:
    """Register an async function of a `Subject`; the first sentence of its docstring is shown."""

    def register(body: Body) -> Body:
        name = getattr(body, "__name__", "")
        text = " ".join((inspect.getdoc(body) or "").split("\n\n", maxsplit=1)[0].split())
        registered.append(Check(group, name, text, body, limit_s, needs_root))
        return body

    return register


def demand(condition: object, message: str) -> None:
    """Raise unless `condition` holds.

    Raises:
        Violation: with `message`, which says what the backend did.
    """
    if not condition:
        raise Violation(message)
