"""Runs checks, each on its own thread and event loop, so that none can hang the rest."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvconnect.backend import Backend
from kvconnect.backends.main_loop import main_loop
from kvconnect.errors import ConfigurationError, nearest
from kvconnect.testing.check import Check, Outcome, Result, Violation
from kvconnect.testing.checks import all_checks
from kvconnect.testing.processes.packed import refuse_while_imported
from kvconnect.testing.subject import Subject, Unsupported
from kvconnect.testing.subjects import FunctionSubject

_GRACE_S = 5.0
_CLEANING = Check("cleaning", "up", "", lambda subject: subject.clean(), 30.0)


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all checks.

    Attributes:
        outcomes: the outcomes, in the order in which the checks ran.
        seed: the random seed.
    """

    outcomes: tuple[Outcome, ...]
    seed: int

    @property
    def ok(self) -> bool:
        """Returns true if no check failed."""
        return not self.of("failed")

    def of(self, result: Result) -> tuple[Outcome, ...]:
        """Returns the outcomes with this result."""
        return tuple(outcome for outcome in self.outcomes if outcome.result == result)

    def raise_on_failure(self) -> None:
        """Raises if a check failed.

        Raises:
            Violation: names every failed check, with its reason.
        """
        if not self.ok:
            raise Violation(f"\n{self}")

    def __str__(self) -> str:
        lines = [_line(outcome) for outcome in self.outcomes]
        counts = ", ".join(
            f"{len(self.of(kind))} {kind}" for kind in ("passed", "failed", "skipped")
        )
        return "\n".join([*lines, f"{counts} (seed {self.seed})"])


def _line(outcome: Outcome) -> str:
    said = outcome.reason or outcome.check.demands
    return f"{outcome.result:<8}{outcome.check.id:<40}{outcome.seconds:6.2f} s  {said}"


def check_backend(
    make: Callable[[], Backend] | Subject,
    *,
    only: Sequence[str] = (),
    seed: int = 0,
    long: bool = False,
    told: Callable[[Outcome], None] | None = None,
) -> Report:
    """Runs all checks on the backends that `make` makes, and returns their results. Blocks.

    The checks fill and empty the store's medium: use an empty one. Runs without pytest.

    Args:
        make: makes an unopened backend, always on the same medium; or a `Subject`, which enables
            more checks. A function at the top of a module can also be called in child processes.
        only: names of groups or checks; empty: all.
        seed: the random seed.
        long: true for the long form, which takes minutes instead of seconds.
        told: called with the outcome of each check.

    Raises:
        ConfigurationError: `only` names no check.
    """
    refuse_while_imported()
    subject = make if isinstance(make, Subject) else FunctionSubject(make)
    subject.seed, subject.long = seed, long
    outcomes = []
    for one in select(only):
        outcomes.append(run_check(one, subject))
        if subject.tidy:
            run_check(_CLEANING, subject)
        if told is not None:
            told(outcomes[-1])
    return Report(tuple(outcomes), seed)


def select(only: Sequence[str] = ()) -> tuple[Check, ...]:
    """Returns the checks with these ids or groups, in their order; all, if there are no names.

    Raises:
        ConfigurationError: a name is neither a check nor a group.
    """
    checks = all_checks()
    known = sorted({name for one in checks for name in (one.id, one.group)})
    for name in only:
        if name not in known:
            raise ConfigurationError(f"check '{name}' is unknown; {nearest(name, known)}")
    return tuple(one for one in checks if not only or one.id in only or one.group in only)


def run_check(one: Check, subject: Subject) -> Outcome:
    """Runs one check and returns its result, little later than its limit. Blocks."""
    start = time.monotonic()
    raised: list[BaseException] = []
    limit_s = one.limit_s * (20 if subject.long else 1)
    left_out = subject.skip.get(one.id) or subject.skip.get(one.group)
    if left_out:
        return Outcome(one, "skipped", left_out)
    if one.needs_root and os.geteuid() != 0:
        return Outcome(one, "skipped", "it mounts file systems: run it as root")

    def run() -> None:
        try:
            with main_loop(_GRACE_S / 2) as loop:
                loop.run_until_complete(_limited(one.body(subject), limit_s))
        except BaseException as error:  # noqa: BLE001 - it is reported below, whatever it is
            raised.append(error)

    thread = threading.Thread(target=run, name=f"kvconnect-check {one.id}", daemon=True)
    thread.start()
    thread.join(limit_s + _GRACE_S)
    seconds = time.monotonic() - start
    if thread.is_alive():
        blocked = Violation(
            f"hangs: it blocks the event loop, or ignores cancellation ({seconds:.0f} s)"
        )
        return Outcome(one, "failed", str(blocked), seconds, blocked)
    if not raised:
        return Outcome(one, "passed", "", seconds)
    (error,) = raised
    if isinstance(error, Unsupported):
        return Outcome(one, "skipped", str(error), seconds)
    reason = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
    return Outcome(one, "failed", " ".join(reason.split()), seconds, error)


async def _limited(body: Any, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s) as limit:
            await body
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise Violation(f"hangs: not done after {limit_s:g} s") from error
