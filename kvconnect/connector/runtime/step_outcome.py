"""The outcome of a step for requests whose transfers ended in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from kvconnect.connector.runtime.reporting import RequestRecord

__all__ = ["BlockFate", "LoadFailed", "StepOutcome"]


@dataclass(slots=True)
class StepOutcome:
    """The transfers that ended in a step, on all ranks.

    Attributes:
        loaded: request id to its number of leading valid tokens: loads that succeeded in the
            background.
        loaded_from: those of `loaded` that overlapped with computing, whether they succeeded or
            not: the tokens from there to the load's end are valid. The tokens before are valid as
            far as they were computed.
        failed: the same for loads that did not, synchronous ones too: nothing past that position
            may be sampled, committed, published or streamed.
        requeue: those of `failed` that cannot continue with their blocks: these may still get
            writes and there are no fresh ones, or there are windows. Free their resources and put
            them back into the queue.
        saved: ended requests whose kept blocks are to be freed now.
    """

    loaded: dict[int, int] = field(default_factory=dict)
    loaded_from: dict[int, int] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    requeue: set[int] = field(default_factory=set)
    saved: list[int] = field(default_factory=list)


class BlockFate(Enum):
    """The fate of a request's blocks past the valid position when its load failed."""

    KEPT = "kept"
    EXCHANGED = "exchanged"  # for fresh ones; the old ones are in the quarantine
    LOST = "lost"  # the request goes back to the queue: no fresh ones, or there are windows


LoadFailed = Callable[[RequestRecord, int, BlockFate], None]
"""Called with a request and its valid tokens."""
