"""Prepares a follower's process first, so that a connector's imports have their effect here."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

__all__ = ["in_followers", "preparation", "prepare"]

_calls: dict[str, None] = {}


def in_followers(call: str) -> None:
    """Makes every follower that is started later call `call`, as ``module:function``. Idempotent.

    It is called without arguments, before the import of the connector's module, and of anything in
    kvconnect except what starts the process.
    """
    _calls[call] = None


def preparation() -> tuple[str, ...]:
    """Returns the calls of followers, in order."""
    return tuple(_calls)


def prepare(calls: Sequence[str]) -> None:
    """Makes `calls`, also in the processes that this one starts.

    Raises:
        Exception: the error of one of them.
    """
    for call in calls:
        module, _, name = call.partition(":")
        getattr(import_module(module), name)()
        in_followers(call)
