"""The messages between the pair's scheduler and its workers. Picklable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvconnect.connector.disagg.messages import EndOrder, FetchOrder, PublishOrder
from kvconnect.connector.io.orders import LoadBlocks, SaveOrder

__all__ = ["OffloadMeta", "RequestEnd", "WorkerMeta"]


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """A request that ended and whose blocks are kept until they are staged.

    Attributes:
        request_id: whose.
        num_tokens: its leading valid tokens.
        rest: blocks that were not ordered before.
        waits: whether blocks wait for room in the staging memory; otherwise those without room are
            dropped.
    """

    request_id: int
    num_tokens: int
    rest: SaveOrder | None
    waits: bool


@dataclass(frozen=True, slots=True)
class OffloadMeta:
    """The message of the scheduler to every worker in a step.

    Attributes:
        loads: to be started, from the store.
        floors: of requests that compute beside their load, the tokens before which no worker may
            write from now on.
        saves: blocks that this step fills.
        ended: requests whose last blocks are to be staged.
        forgotten: requests whose orders of earlier steps are dropped.
        fetches: loads to be started, from other engines.
        publish: prompts that the step computes for other engines.
        shared: requests that ended and whose blocks are kept for other engines.
        lost: requests that ended and whose blocks are free: they are not published any more.
    """

    loads: tuple[LoadBlocks, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    ended: tuple[RequestEnd, ...] = ()
    forgotten: tuple[int, ...] = ()
    fetches: tuple[FetchOrder, ...] = ()
    publish: tuple[PublishOrder, ...] = ()
    shared: tuple[EndOrder, ...] = ()
    lost: tuple[int, ...] = ()
    floors: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerMeta:
    """The message of a worker to the scheduler in a step.

    Attributes:
        missing: for requests the number of the first block that was dropped or could not be stored.
        backlogged: ended requests wait for room in the staging memory.
        dropped: those of `missing` whose block had no room in the staging memory.
    """

    missing: Mapping[int, int] = field(default_factory=dict)
    backlogged: bool = False
    dropped: frozenset[int] = frozenset()
