"""The messages between the pair's scheduler and its workers. Picklable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvconnect.connector.disagg.messages import EndOrder, FetchOrder, PublishOrder
from kvconnect.connector.io.orders import LoadBlocks, SaveOrder


@dataclass(frozen=True, slots=True)
class OffloadMeta:
    """The message of the scheduler to every worker in a step.

    Attributes:
        loads: loads from the store to start.
        floors: for requests that compute beside their load, the token before which no worker may
            write any more.
        saves: saves of blocks that this step fills.
        ended: ended requests whose last blocks are to be staged.
        forgotten: requests whose earlier orders are dropped.
        fetches: loads from other engines to start.
        publish: prompts that this step computes for other engines.
        shared: ended requests whose blocks are kept for other engines.
        lost: ended requests whose blocks are free, so that they cannot be published any more.
    """

    loads: tuple[LoadBlocks, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    ended: tuple[SaveOrder, ...] = ()
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
        missing: by request, the number of the first block that was dropped, could not be stored or
            may be lost: it is to be saved at the request's end.
        backlogged: true if ended requests wait for staging memory.
        dropped: the requests in `missing` whose block was dropped for lack of staging memory.
    """

    missing: Mapping[int, int] = field(default_factory=dict)
    backlogged: bool = False
    dropped: frozenset[int] = frozenset()
