"""Prepares the processes of followers, so that a connector's imports have the same effect there."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

_calls: dict[str, None] = {}


def in_followers(call: str) -> None:
    """Makes every follower that is started later call `call`, as ``module:function``. Idempotent.

    A follower calls it without arguments, before it imports the connector's module, and any module
    of kvconnect that is not needed to start the process.
    """
    _calls[call] = None


def preparation() -> tuple[str, ...]:
    """Returns the calls of followers, in order."""
    return tuple(_calls)


def prepare(calls: Sequence[str]) -> None:
    """Makes `calls`, also in processes that this one starts.

    Raises:
        Exception: the error of a call.
    """
    for call in calls:
        module, _, name = call.partition(":")
        getattr(import_module(module), name)()
        in_followers(call)
