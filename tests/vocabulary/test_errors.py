"""The tree of errors is what its module's docstring draws."""

from __future__ import annotations

import inspect
import re
from concurrent.futures import Future

import pytest

from kvconnect import errors


def _classes() -> dict[str, type]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.KvConnectError)
    }


def test_the_docstring_draws_every_class_under_its_base():
    stack: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    ([│ ├└─]*)(\w+)", line)
        if match is None or match[2] not in _classes():
            continue
        depth = len(match[1]) // 4
        del stack[depth:]
        if stack:
            assert issubclass(_classes()[match[2]], _classes()[stack[-1]]), line
        stack.append(match[2])
    drawn = re.findall(r"^    [│ ├└─]*(\w+)", errors.__doc__ or "", re.MULTILINE)
    assert set(drawn) == set(_classes())


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigurationError, ValueError),
        (errors.BackendUnavailable, OSError),
        (errors.BackendTimeout, TimeoutError),
        (errors.UnknownRequest, KeyError),
    ],
)
def test_errors_are_also_the_builtin_that_callers_expect(error, builtin):
    assert issubclass(error, builtin)


def test_every_class_is_exported():
    assert set(_classes()) <= set(errors.__all__)


def test_errors_read_as_sentences_and_say_what_to_do():
    assert str(errors.UnknownRequest("request 7 is not known")) == "request 7 is not known"
    message = str(errors.MissingExtra("store scheme 'redis'", "redis"))
    assert "pip install '.[redis]'" in message


def test_a_timeout_carries_what_is_still_running():
    pending: Future[None] = Future()
    assert errors.BackendTimeout("late", pending).pending is pending
    assert errors.BackendTimeout("never started").pending is None


def test_nearest_names_a_close_name_or_else_all():
    assert errors.nearest("dsk", ["disk", "memory"]) == "did you mean 'disk'?"
    assert errors.nearest("DISK", ["Disk", "memory"]) == "did you mean 'Disk'?"
    assert errors.nearest("xyz", ["disk", "memory"]) == "valid are disk, memory"
