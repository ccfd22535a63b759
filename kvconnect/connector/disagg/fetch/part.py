"""The part of a load that one rank of the other engine has. It belongs to the fetcher's thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvconnect.connector.disagg.fetch.arrivals import Arrivals
from kvconnect.connector.disagg.fetch.pieces import FetchPlan, RemoteBlocks, cut_reads
from kvconnect.connector.disagg.fetch.sources import Source
from kvconnect.connector.disagg.messages import FetchOrder
from kvconnect.connector.io.lookup import blocks_needed
from kvconnect.layout import KvCacheLayout
from kvconnect.transfer.claimed import Claimed
from kvconnect.transfer.claims import LeaseClient
from kvconnect.transfer.control.messages import NOTHING_COMPUTED, Hello
from kvconnect.transfer.leases.held import Outcome
from kvconnect.transfer.peers import PeerLink
from kvconnect.transfer.pull import Pull
from kvconnect.transfer.reads import Reads

_PULLS_IN_FLIGHT = 4
PULL_NBYTES = 32 << 20
# Seconds that a pull, or the answer to a release, may take beside the time of its bytes.
_SLACK_S = 2.0
# Between two checks whether a connection is there.
_CONNECTING_S = 0.05


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """The pools that loads of a rank fill, and the limits of the loads.

    Attributes:
        layouts: the layouts of the pool groups.
        pools: the memory of each pool group, in their order, by its number at the transport.
        load_s: the longest time that a load may take, in seconds.
        idle_s: how long a load waits for the other engine to compute more, in seconds.
        min_bytes_per_s: the rate below which a pull counts as failed.
        verify: digests of both engines are compared before a load counts as valid.
    """

    layouts: Sequence[KvCacheLayout]
    pools: Mapping[int, Tensor]
    load_s: float
    idle_s: float
    min_bytes_per_s: float
    verify: bool = False


class Part:
    """Reads more of a prompt whenever a rank of the other engine has computed more of it.

    The part becomes valid as a whole or not at all: its reads count only if the lease held until
    the last one had ended, and the other engine has confirmed that it kept the blocks until then. A
    part changes no other object. The fetcher checks the part after each call, and ends the load if
    need be.

    If the request computes beside the load, each block counts by itself, see `Arrivals`. The part
    then ends once every block that is not computed is certain.

    Args:
        order: the order of the load, with the blocks that it fills.
        claim: the claim made when the request arrived.
        link: the connection to the other side.
        pull: starts a pull, which later calls `pull_done` and `pull_terminal`; ``None``: there is
            no memory for it before the next call of `advance`.
        compare: compares the bytes of both sides, and later calls `compared`.
        settings: this side's pools, and the limits of a load, which begins now.
        source: the rank of the other side, and the heads that are read from it.
        most_nbytes: the most bytes of a pull, but a piece at least.

    Attributes:
        over: true once the part succeeded, failed or was cancelled.
        failed: the reason of the failure; ``None``: none.
        nbytes: the bytes that were read.
        arrivals: the blocks that have come; ``None``: no token is computed beside the load.
    """

    def __init__(
        self,
        order: FetchOrder,
        claim: Claimed,
        link: PeerLink,
        *,
        pull: Callable[[Part, Reads], Pull | None],
        compare: Callable[[Part, Reads], None],
        settings: FetchSettings,
        source: Source,
        most_nbytes: int = PULL_NBYTES,
    ) -> None:
        self.order = order
        self.claim = claim
        self.link = link
        self.over = False
        self.failed: str | None = None
        self.nbytes = 0
        self._pull = pull
        self._compare = compare
        self._settings = settings
        self._source = source
        self._plan = FetchPlan(order, settings.layouts, tuple(settings.pools), source.heads)
        self.arrivals = Arrivals(order, self._plan, claim) if order.overlaps else None
        self._most_nbytes = most_nbytes
        self._told: tuple[Hello, list[KvCacheLayout]] | None = None
        self._computed = NOTHING_COMPUTED
        self._remote = [RemoteBlocks(0, 0, (), layout) for layout in settings.layouts]
        self._ready: deque[Reads] = deque()
        self._pulls: set[Pull] = set()  # not terminal
        self._reading: set[Pull] = set()  # not done
        self._progress_at = time.monotonic()
        self._deadline = self._progress_at + settings.load_s
        self._look_at: float | None = None  # again, for whether there is a connection
        self._released_at: float | None = None
        self._to_release: Claimed | None = None
        self._unverified: deque[Reads] | None = None if settings.verify else deque()
        self._verifying = 0

    @property
    def writes_ended(self) -> bool:
        """Returns whether no pull can write to its blocks any more."""
        return not self._pulls or self.arrivals is not None

    def due(self) -> float:
        """Returns the monotonic time at which `advance` is due if no event comes first."""
        if self._released_at is not None:
            return min(self._deadline, self._released_at + _SLACK_S)
        if self._reading:  # they have deadlines of their own
            return self._deadline
        due = min(self._deadline, self._progress_at + self._settings.idle_s)
        return due if self._look_at is None else min(due, self._look_at)

    def numbers(self, reads: Reads) -> npt.NDArray[np.int64]:
        """Returns int64[n], the block of the order that each piece of `reads` is of."""
        return self._plan.numbers(reads)

    # ------------------------------------------------------------------ what happens

    def advance(self) -> None:
        """Starts new reads; ends the part once its result is known.

        Called after every event, and at `due`.
        """
        if self.over:
            return
        claimed, now = self.claim, time.monotonic()
        self._look_at = now + _CONNECTING_S if self.link.handle is None else None
        if self._released_at is None and claimed.failed:
            self.fail(claimed.reason)
        elif self._released_at is not None:
            self._decide(claimed.lease.outcome, late=now >= self.due())
        elif now >= self._deadline:
            self.fail("it took longer than load_timeout_s allows")
        else:
            self._read_on(claimed)
            self._check_progress(now)

    def pull_done(self, pull: Pull, error: BaseException | None) -> None:
        """Handles the end of `pull`."""
        self._reading.discard(pull)
        if self.over:
            return
        if error is not None:
            self.fail(str(error))
            return
        self.nbytes += pull.nbytes
        self._progress_at = time.monotonic()
        self.advance()

    def pull_terminal(self, pull: Pull) -> None:
        """Drops `pull`, which writes no more bytes."""
        self._pulls.discard(pull)

    def compared(self, *, same: bool) -> None:
        """Handles the answer to a comparison."""
        self._verifying -= 1
        self._progress_at = time.monotonic()
        if same:
            self.advance()
        else:
            self.fail("the other side has other bytes than those that were read, or says none")

    def release(self, client: LeaseClient) -> None:
        """Releases the lease once everything was read.

        The request that waits for the load continues before the release is sent.
        """
        claimed, self._to_release = self._to_release, None
        if claimed is not None:
            outcome = client.release(claimed)
            if self.over:
                self.claim.drop()
            else:
                self._decide(outcome, late=False)

    def fail(self, reason: str) -> None:
        """Stops reading and discards what was read."""
        if self.over:
            return
        self.over, self.failed = True, reason
        self._to_release = None
        self._ready.clear()
        self.claim.drop()
        for pull in self._reading:
            pull.abandon()
        self._pulls = {pull for pull in self._pulls if not pull.terminal.is_set()}

    # ------------------------------------------------------------------ inside

    def _read_on(self, claimed: Claimed) -> None:
        if not self._plan.complete:
            if self._learn(claimed):
                self._progress_at = time.monotonic()
            if self._plan.lacks(self._remote):
                self.fail(
                    "a window of the other side, with other tokens_per_block, begins too late"
                )
                return
        if not self._begin_reads(claimed):
            return
        if self.arrivals is not None:
            self._end_if_certain(claimed, self.arrivals)
            return
        all_is_read = self._plan.complete and not self._ready and not self._reading
        if all_is_read and claimed.mark.kept and self._verified():
            self._end_reads(claimed)

    def _begin_reads(self, claimed: Claimed) -> bool:
        """Starts reads of what is computed; returns False if that failed the part."""
        while len(self._reading) < _PULLS_IN_FLIGHT and not self.over:
            if not self._ready and not self._plan.complete:
                for reads in (self.arrivals or self._plan).take(self._computed, self._remote):
                    leased = replace(reads, epoch=claimed.lease.epoch or 0)
                    self._ready += cut_reads(leased, self._most_nbytes)
            if not self._ready:
                break
            if not claimed.lease.may_read():
                self.fail("the lease is over")
                return False
            pull = self._pull(self, self._ready[0])
            if pull is None:
                break
            self._ready.popleft()
            self._pulls.add(pull)
            self._reading.add(pull)
        return not self.over

    def _end_if_certain(self, claimed: Claimed, arrivals: Arrivals) -> None:
        """Ends a part beside computing once every block that is not computed is certain."""
        head, tail = arrivals.certain()
        if not (arrivals.all_here and head >= tail) or self.over:
            return
        self._ready.clear()  # and the running pulls are of computed blocks
        for pull in self._reading:
            pull.abandon()
        self._reading.clear()
        self._released_at = time.monotonic()
        self._to_release = claimed
        self._succeed()

    def _verified(self) -> bool:
        """Returns whether the other side has confirmed that it still holds all blocks read."""
        if self._unverified is None:
            self._unverified = deque(
                part
                for reads in self._plan.checks(self._remote)
                for part in cut_reads(reads, PULL_NBYTES)
            )
        while self._unverified and self._verifying < _PULLS_IN_FLIGHT:
            self._verifying += 1
            self._compare(self, self._unverified.popleft())
        return not self._verifying

    def _end_reads(self, claimed: Claimed) -> None:
        self._released_at = time.monotonic()
        claimed.lease.reads_ended()
        self._to_release = claimed
        if claimed.lease.outcome is Outcome.VALID:
            self._succeed()

    def _check_progress(self, now: float) -> None:
        idle_s = self._settings.idle_s
        if not self._reading and now >= self._progress_at + idle_s:
            self.fail(f"the other side computed nothing more of it for {idle_s:g} s")

    def _learn(self, claimed: Claimed) -> bool:
        """Records the other side's messages about the claim; returns whether one was new."""
        hello, mark = self.link.hello, claimed.mark
        if not claimed.tokens or hello is None or len(claimed.blocks) > len(self._remote):
            return False
        if (hello.rank, hello.tp_size) != (self._source.rank, self.order.tp_size):
            self.fail(
                f"it is rank {hello.rank} of {hello.tp_size}, not {self._source.rank} of "
                f"{self.order.tp_size}, as kv_transfer_params['tp_size'] says"
            )
            return False
        layouts = self._their_layouts(hello)
        for group, ids in enumerate(claimed.blocks):
            layout = layouts[group]
            needed = blocks_needed(layout.window, claimed.tokens, layout.tokens_per_block)
            # A window's peer sends only these ids; for other groups it sends all from the first on.
            self._remote[group] = RemoteBlocks(hello.pools[group].region, needed.start, ids, layout)
        if not self._computed < mark:
            return False
        self._computed = mark.after(self._computed)
        return True

    def _their_layouts(self, hello: Hello) -> list[KvCacheLayout]:
        """Returns the layouts of the other engine's pools, which `Peers` has checked."""
        if self._told is None or self._told[0] is not hello:
            self._told = (hello, [one.layout() for one in hello.pools])
        return self._told[1]

    def _decide(self, outcome: Outcome, *, late: bool) -> None:
        if outcome is Outcome.VALID:
            self._succeed()
            self.claim.drop()
        elif outcome is Outcome.INVALID:
            self.fail("the lease was over before the last read was")
        elif late:
            self.fail("the other side did not say whether what was read is valid")

    def _succeed(self) -> None:
        if not self.over:
            self.over = True
            self._pulls.clear()  # each is done, and so terminal
