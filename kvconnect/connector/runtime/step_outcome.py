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
        loaded: leading valid tokens by request id, for background loads that succeeded.
        loaded_from: by request id, for ended loads that overlapped with computing, the token from
            which on all up to the load's end are valid. The tokens before are valid as far as they
            were computed.
        failed: leading valid tokens by request id, for failed loads, also synchronous ones. No
            token past that position may be sampled, committed, published or streamed.
        requeue: the requests in `failed` that cannot continue, because their blocks may still get
            writes and no fresh blocks are free, or because of windows. The engine frees their
            resources and returns them to the queue.
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
    LOST = "lost"  # the request returns to the queue: no fresh blocks, or windows


LoadFailed = Callable[[RequestRecord, int, BlockFate], None]
"""Called with a request and its valid tokens."""
