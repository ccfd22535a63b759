"""The outcome of a call that loads blocks."""

from __future__ import annotations

from collections.abc import Awaitable
from concurrent.futures import Future
from dataclasses import dataclass

from kvconnect.errors import BackendTimeout, KvConnectError
from kvconnect.explain.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Fetched:
    """The outcome of a call to the store that loads blocks.

    Attributes:
        filled: the number of leading slots that hold their block.
        reason: the reason why other slots do not.
        loss: the reason as an outcome of the tokens.
        pending: futures; the store may write into the slots until they are done.
    """

    filled: int
    reason: str = ""
    pending: tuple[Future[None], ...] = ()
    loss: Outcome = Outcome.FAILED


async def fetched(loading: Awaitable[int], wanted: int) -> Fetched:
    """Returns the outcome of `loading`, a call to `Backend.load` for `wanted` blocks."""
    try:
        filled = await loading
    except BackendTimeout as error:
        pending = () if error.pending is None else (error.pending,)
        return Fetched(0, str(error), pending, Outcome.LATE)
    except KvConnectError as error:
        return Fetched(0, str(error))
    missing = filled < wanted
    reason = "a block is gone from the store, or was damaged" if missing else ""
    return Fetched(filled, reason, loss=Outcome.EVICTED)
