"""What a follower's process does first, so that a connector's imports mean what they do here."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

__all__ = ["in_followers", "preparation", "prepare"]

_calls: dict[str, None] = {}


def in_followers(call: str) -> None:
    """Every follower that is started from now on calls `call`, as ``module:function``. Idempotent.

    Before it imports the connector's module, and anything of kvconnect but what starts it; without
    arguments.
    """
    _calls[call] = None


def preparation() -> tuple[str, ...]:
    """What followers are to call, in order."""
    return tuple(_calls)


def prepare(calls: Sequence[str]) -> None:
    """Make `calls`, and have processes that this one starts make them, too.

    Raises:
        Exception: what one of them raises.
    """
    for call in calls:
        module, _, name = call.partition(":")
        getattr(import_module(module), name)()
        in_followers(call)
