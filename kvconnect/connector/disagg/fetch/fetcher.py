"""Loads from other engines, all of them on one thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from kvconnect.connector.data import Direction, TransferFailure
from kvconnect.connector.disagg.fetch.claim_book import ClaimBook
from kvconnect.connector.disagg.fetch.landing import LANDING_SHARE, Landing
from kvconnect.connector.disagg.fetch.load import Load, LoadsBeside
from kvconnect.connector.disagg.fetch.part import PULL_NBYTES, FetchSettings, Part
from kvconnect.connector.disagg.fetch.sources import Source, sources
from kvconnect.connector.disagg.messages import FetchOrder
from kvconnect.errors import KvConnectError, PullFailed, RetryLater, UsageError
from kvconnect.trace import count, warn_once
from kvconnect.transfer.control.messages import FindDigest, FoundDigest
from kvconnect.transfer.digests import digest_of_pieces
from kvconnect.transfer.peers import PeerLink
from kvconnect.transfer.pull import Pull
from kvconnect.transfer.quarantine import Quarantine
from kvconnect.transfer.reads import Reads
from kvconnect.transfer.transport import PeerHandle, Transport

logger = logging.getLogger("kvconnect")

_SLACK_S = 2.0


class Fetcher:
    """Claims, reads and releases other engines' blocks.

    The worker calls the public methods on the engine's thread, unless they say otherwise.

    Args:
        transport: the transport of blocks.
        claims: the claims that the scheduler made; a rank without a scheduler makes them when a
            load begins.
        settings: this side's pools, and the limits of a load.
        quarantine: the quarantine of blocks that failed pulls may still write to.
        landing: the memory for loads whose requests compute meanwhile; ``None``: none do.

    Attributes:
        claims: the argument.
        beside: those loads.
    """

    def __init__(
        self,
        transport: Transport,
        claims: ClaimBook,
        settings: FetchSettings,
        *,
        quarantine: Quarantine,
        landing: Landing | None = None,
    ) -> None:
        self._transport = transport
        self._settings = settings
        self._landing = landing
        self.beside = LoadsBeside()
        self._quarantine = quarantine
        self.claims = claims
        self._expected: dict[int, Load] = {}  # and the next are this thread's
        self._fetches: dict[int, Load] = {}  # until nothing lands any more
        self._flying_nbytes = 0
        self._handles: dict[Pull, PeerHandle] = {}
        self._posted: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvconnect-fetch", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the worker's

    def expect(
        self,
        order: FetchOrder,
        done: Callable[[int, TransferFailure | None], None],
        news: Callable[[], None] = lambda: None,
    ) -> None:
        """Registers a load that `begin` starts, unless `cancel` comes first.

        `done` and `news` are called on the fetcher's thread, see `Load`.
        """
        load = Load(order, self._settings.layouts[0].tokens_per_block, done, news=news)
        self.beside.add(load)
        self._post(partial(self._expected.__setitem__, order.request_id, load))

    def raise_floor(self, request_id: int, num_tokens: int) -> None:
        """Keeps the load of `request_id`, if it runs beside computing, from writing before that.

        The details are those of `Load.raise_floor`.
        """
        if (load := self.beside.raise_floor(request_id, num_tokens)) is not None:
            self._post(partial(self._advance, load))

    def begin(self, order: FetchOrder) -> None:
        """Begins an expected load once its blocks have no other user. Callable on any thread."""
        self._post(partial(self._begin, order))

    def cancel(self, request_id: int) -> None:
        """Ends a load whose request was cancelled; does nothing if the load does not run here."""
        self._post(partial(self._cancel, request_id))

    def close(self) -> None:
        """Ends every load and claim, and sends that to connected peers. Blocks.

        The blocks get no more writes once the transport is closed.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._landing = None
        self.claims.drop_all()

    # ------------------------------------------------------------------ the thread

    def _post(self, call: Callable[[], None]) -> None:
        with self._changed:
            self._posted.append(call)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            due = min((part.due() for part in self._parts() if not part.over), default=None)
            with self._changed:
                if not self._posted and not self._closed:
                    wait_s = None if due is None else max(0.0, due - time.monotonic())
                    self._changed.wait(wait_s)
                posted, self._posted = self._posted, deque()
                closed = self._closed
            for call in posted:
                self._guarded(call)
            if closed:
                break
            now = time.monotonic()
            for part in self._parts():
                if not part.over and part.due() <= now:
                    self._guarded(partial(self._step, part, part.advance))
        for load in list(self._fetches.values()):
            load.stop("the engine is shutting down")
            self._settle(load.order)

    def _parts(self) -> list[Part]:
        return [part for load in self._fetches.values() for part in load.parts]

    @staticmethod
    def _guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # only this load has failed; the others continue
            count("transfer.fetch.error")
            logger.exception("a fetch went wrong")

    def _step(self, part: Part, call: Callable[[], None]) -> None:
        """Runs `call` for `part`, and ends the part's load if its result is then known."""
        try:
            call()
            self._settle(part.order)
            part.release(self.claims.client)
            if part.arrivals is not None and not part.over and part.arrivals.is_uncertain:
                self.claims.client.confirm(part.claim)
        except Exception as error:
            part.fail(repr(error))  # otherwise an unread piece would count as read
            raise
        finally:
            self._settle(part.order)

    def _advance(self, load: Load) -> None:
        """Starts new reads of a load beside computing."""
        if self._fetches.get(load.order.request_id) is load:
            load.note()
            for part in load.parts:
                self._guarded(partial(self._step, part, part.advance))

    def _settle(self, order: FetchOrder) -> None:
        """Reports the end of the load `order` once known; removes the load after its writes."""
        load = self._fetches.get(order.request_id)
        if load is None:
            return
        load.note()
        failed = next((part.failed for part in load.parts if part.failed is not None), None)
        if load.reason is None and failed is not None:
            load.reason = failed
            load.stop(failed)
            if not load.cancelled:
                self._report_failure(load, failed, writes_ended=load.writes_ended)
                if load.writes_ended:
                    del self._fetches[order.request_id]
                    return
        if load.reason is None and load.over:
            count("transfer.fetched", tokens=load.num_tokens, bytes=load.nbytes)
        elif load.reason is None or not load.writes_ended:
            return
        del self._fetches[order.request_id]
        load.ended = True
        load.done(order.request_id, None)

    def _begin(self, order: FetchOrder) -> None:
        load = self._expected.pop(order.request_id, None)
        if load is None:
            return
        try:
            for source in sources(self.claims.heads, order.tp_size):
                load.parts.append(self._part(order, source))
        except Exception as error:
            self.claims.drop(order)
            refused = isinstance(error, RetryLater)
            self._report_failure(load, str(error) if refused else repr(error), writes_ended=True)
            if refused:
                return
            raise
        self._fetches[order.request_id] = load
        for part in load.parts:
            part.claim.listener = partial(self._post_step, part, part.advance)
            self._step(part, part.advance)

    def _part(self, order: FetchOrder, source: Source) -> Part:
        claim = self.claims.of(order, source)
        if claim is None or claim.link is None:
            raise RetryLater((claim and claim.reason) or "it was never claimed")
        return Part(
            order,
            claim,
            claim.link,
            pull=self.pull,
            compare=self._compare,
            settings=self._settings,
            source=source,
            most_nbytes=self._memory.slot_nbytes if order.overlaps else PULL_NBYTES,
        )

    def _cancel(self, request_id: int) -> None:
        if load := self._fetches.get(request_id):
            load.cancelled = load.reason is None
            load.stop("cancelled")
            self._settle(load.order)
        elif load := self._expected.pop(request_id, None):
            self.claims.drop(load.order)
            load.ended = True
            load.done(request_id, None)

    # ------------------------------------------------------------------ for parts

    def pull(self, part: Part, reads: Reads) -> Pull | None:
        """Starts a pull of `reads`, with a deadline that allows for all pulls under way.

        Returns ``None`` if a load beside computing finds no memory to land in. Its part is advanced
        once there is some.
        """
        slot, landed = None, reads
        if part.arrivals is not None:
            if (slot := self._memory.take()) is None:
                return None
            landed = self._memory.into(slot, reads)
        nbytes = self._flying_nbytes + reads.total_nbytes
        pull = self._start(part.link, landed, _SLACK_S + nbytes / self._settings.min_bytes_per_s)
        self._flying_nbytes = nbytes
        pull.done.add_done_callback(
            lambda done: self._post_step(
                part, partial(self._pull_done, part, pull, done.exception(), reads, slot)
            )
        )
        pull.terminal.add_callback(lambda: self._post_step(part, partial(part.pull_terminal, pull)))
        return pull

    @property
    def _memory(self) -> Landing:
        if self._landing is None:
            raise UsageError("a load beside computing needs memory to land in")
        return self._landing

    def _slot_freed(self, slot: int) -> None:
        self._memory.give_back(slot)
        for load in list(self._fetches.values()):
            if load.order.overlaps:
                self._advance(load)

    def _compare(self, part: Part, reads: Reads) -> None:
        """Asks for the other side's digest of `reads`, and compares it on this thread."""
        answer = part.link.ask(
            lambda seq: FindDigest(
                seq=seq,
                region=reads.remote_region,
                nbytes=reads.nbytes,
                offsets=tuple(reads.remote_offsets.tolist()),
            )
        )

        def compare() -> None:
            found = None if answer.cancelled() else answer.result()
            same = False
            if isinstance(found, FoundDigest):
                memory = self._settings.pools[reads.local_region]
                ours = digest_of_pieces(memory, reads.local_offsets.tolist(), reads.nbytes)
                same = ours == found.digest
            if not same:
                count("transfer.bad_digests")
            part.compared(same=same)

        answer.add_done_callback(lambda _: self._post_step(part, compare))

    def _post_step(self, part: Part, call: Callable[[], None]) -> None:
        self._post(partial(self._step, part, call))

    def _start(self, link: PeerLink, reads: Reads, deadline_s: float) -> Pull:
        error: Exception | None = None
        handle = link.handle
        if handle is not None and not self._quarantine.accepts(handle):
            error = RetryLater("too many of its earlier reads may still be written")
        elif handle is not None:
            try:
                pull = self._transport.pull(handle, reads, deadline_s=deadline_s)
                self._handles[pull] = handle
                return pull
            except KvConnectError as caught:
                error = caught
        pull = Pull(reads.total_nbytes)
        pull.finish(PullFailed("peer", f"{link.address}: {error or 'not connected'}"))
        return pull

    def _pull_done(
        self,
        part: Part,
        pull: Pull,
        error: BaseException | None,
        reads: Reads,
        slot: int | None,
    ) -> None:
        self._flying_nbytes -= pull.nbytes
        if slot is not None:
            try:
                load = self._fetches.get(part.order.request_id)
                if error is None and load is not None:
                    load.place(part, reads, self._memory, slot)
            finally:
                pull.terminal.add_callback(lambda: self._post(partial(self._slot_freed, slot)))
        handle = self._handles.pop(pull, None)
        if handle is not None and not pull.terminal.is_set():
            blocks = -(-pull.nbytes // self._settings.layouts[0].block_nbytes)
            if slot is not None:
                blocks = max(blocks, self._quarantine.share(LANDING_SHARE))
            self._quarantine.hold(pull, handle, blocks)
        part.pull_done(pull, error)

    def _report_failure(self, load: Load, reason: str, *, writes_ended: bool) -> None:
        order, (head, tail) = load.order, load.came_to
        num_tokens = tail - max(order.start, head)
        count("transfer.computed_instead", tokens=num_tokens)
        warn_once(
            f"transfer.computed_instead {reason}"[:200],
            f"request {order.request_id}: {num_tokens} tokens are computed instead of fetched: "
            f"{reason}",
        )
        failure = TransferFailure(
            order.request_id, Direction.LOAD, order.start, reason, writes_ended=writes_ended
        )
        load.ended = writes_ended
        load.done(order.request_id, failure)
