"""The choice of matches to load, and of ended requests that keep their blocks for a save."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.data import Direction
from kvconnect.connector.runtime.answers import checked_keep, checked_match
from kvconnect.connector.runtime.ledger import TransferLedger
from kvconnect.connector.runtime.reporting import RequestRecord, StepReporter
from kvconnect.connector.runtime.request_errors import RequestErrors
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.explain.outcome import Outcome
from kvconnect.request import ExternalMatch, LlmRequest
from kvconnect.trace import warn_once

# With windows a failed load is useless. By the second attempt the store's damaged blocks are
# deleted; further attempts would let a slow store delay a request without end.
_MOST_FAILED_LOADS = 2


class LoadAdmission:
    """Requests one match per admission from the connector, and limits the blocks that loads hold.

    Loading requests and blocks in quarantine take at most ``max_loading_fraction`` of the pool. A
    match beyond that waits for loads in flight to end, for ``load_timeout_s`` at most; then it is
    dropped. A load that is larger than the whole limit starts when no such blocks are held.

    With recurrent states (`whole_blocks`) a match is used only if it ends with a block and leaves a
    token to compute.

    Attributes:
        is_worth: returns whether to start the load of a match; set by the engine.
    """

    def __init__(
        self,
        kv: BaseKVCacheManager,
        ledger: TransferLedger,
        config: KvCacheConnectorConfig,
        *,
        errors: RequestErrors,
        tokens_per_block: int,
        divisible: bool,
        whole_blocks: bool = False,
    ) -> None:
        self._kv = kv
        self._ledger = ledger
        self._errors = errors
        self._max_blocks = int(kv.get_max_resource_count() * config.max_loading_fraction)
        self._longest_wait_s = config.load_timeout_s
        self._tokens_per_block = tokens_per_block
        self._divisible = divisible
        self._whole_blocks = whole_blocks
        self._overlaps = config.overlap_loads and kv.overlaps_loads
        self.is_worth: Callable[[LlmRequest, ExternalMatch], bool] = lambda _request, _match: True
        self._admitted: list[RequestRecord] = []  # includes those of this step, which have a match
        self._dropped: list[int] = []

    def match(
        self, scheduler: KvCacheConnectorScheduler, record: RequestRecord, num_device_tokens: int
    ) -> ExternalMatch:
        """Returns the number of tokens of `record` to load beyond the device match.

        Changes the record's `offer`, and its `match` to the accepted part. No load is accepted
        while too many blocks are in quarantine, or while the blocks of the request's own last load
        are. With windows or several pools, no load is accepted after `_MOST_FAILED_LOADS` failed
        ones, since each of them returns the request to the queue. An error of the connector, or a
        wrong answer, is recorded and ends the request.
        """
        request = record.request
        record.match = None
        request.num_connector_matched_tokens = 0
        position = num_device_tokens - num_device_tokens % self._tokens_per_block
        offer = self._offer(scheduler, record, position)
        # A deferred offer begins at the end of the device match at its time.
        reaches = offer.position <= position and offer.end > num_device_tokens
        request.account.keep(Outcome.SLOWER)
        if reaches and not self._may_load(record):
            request.account.lose(Outcome.FAILED, offer.end)  # earlier loads have not ended
        elif reaches and not self.is_worth(request, offer):
            request.account.lose(Outcome.SLOWER, offer.end)
        elif reaches:
            room = not offer.is_async or self._room(record)
            if room is None:
                return replace(offer, num_tokens=0, deferred=True)
            if room:
                record.match = offer
                request.num_connector_matched_tokens = offer.num_tokens
                return offer
            request.account.lose(Outcome.LATE, offer.end)  # other loads hold the blocks
        return ExternalMatch(position)

    def admitted(self, record: RequestRecord) -> None:
        """Records that `record` has its blocks; its load starts with the step."""
        if record.match is not None:
            self._admitted.append(record)
        elif record.offer is not None and record.offer.is_async:
            self._dropped.append(record.request.request_id)
        record.admitted()

    def take_dropped(self) -> tuple[int, ...]:
        """Returns admitted requests whose background load was dropped, each once."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def start(self, record: RequestRecord) -> bool:
        """Starts the matched load of this admission; returns whether it runs in the background.

        The record has no `match` afterwards.
        """
        request = record.request
        match, record.match = record.match, None
        if match is None:
            return False
        # With windows a match may be cut to before the requested position.
        start = min(match.position, request.num_computed_tokens)
        start -= start % self._tokens_per_block
        self._ledger.start_load(
            request.request_id,
            start,
            match.end,
            is_async=match.is_async,
            overlaps=match.overlaps,
        )
        return match.is_async

    # ------------------------------------------------------------------ inside

    def _offer(
        self, scheduler: KvCacheConnectorScheduler, record: RequestRecord, position: int
    ) -> ExternalMatch:
        if record.offer is None:
            request = record.request
            num_tokens, is_async, overlaps, follows = 0, False, False, False
            if request not in self._errors:
                with self._errors.kept(request):
                    answer = scheduler.get_num_new_matched_tokens(request, position)
                    num_tokens, is_async = checked_match(scheduler, answer)
            # The last token is always computed: its logits are needed.
            most = request.num_tokens - 1 - position
            if self._whole_blocks and (num_tokens > most or num_tokens % self._tokens_per_block):
                num_tokens = 0  # states are at the end of the match alone, which is not used
            num_tokens = max(0, min(num_tokens, most))
            end = position + num_tokens
            may_overlap = self._overlaps and is_async and num_tokens > 0
            if may_overlap and self._kv.fits_beside(request, position, end):
                with self._errors.kept(request):
                    overlaps = scheduler.load_overlaps(request)
                    follows = overlaps and scheduler.load_follows(request)
            record.offer = ExternalMatch(position, num_tokens, is_async, overlaps, follows)
        return record.offer

    def _may_load(self, record: RequestRecord) -> bool:
        quarantine = self._ledger.quarantine
        given_up = not self._divisible and record.failed_loads >= _MOST_FAILED_LOADS
        held = quarantine.holds(Direction.LOAD, record.request.request_id)
        return not (given_up or quarantine.full or held)

    def _room(self, record: RequestRecord) -> bool | None:
        """Returns whether the background load may start now; ``None``: it may start later."""
        loading = self._num_loading()
        held = loading + self._ledger.quarantine.num_blocks
        if held == 0 or held + self._num_blocks(record) <= self._max_blocks:
            return True
        if loading == 0:
            return False  # blocks in quarantine may never be freed
        now = time.monotonic()
        if record.waits_until is None:
            record.waits_until = now + self._longest_wait_s
        return None if now < record.waits_until else False

    def _num_loading(self) -> int:
        """Returns the blocks of group 0 that loading requests hold, those of the next step too."""
        self._admitted = [one for one in self._admitted if one.match is not None]
        starting = [one for one in self._admitted if one.match is not None and one.match.is_async]
        records = [*starting, *self._ledger.loading_records()]
        return sum(map(self._num_blocks, records))

    def _num_blocks(self, record: RequestRecord) -> int:
        return -(-record.request.num_tokens // self._tokens_per_block)


class SaveAdmission:
    """Asks the connector at the end of each request, once, and notes whose saves are to start."""

    def __init__(
        self,
        scheduler: KvCacheConnectorScheduler,
        ledger: TransferLedger,
        reporter: StepReporter,
        errors: RequestErrors,
    ) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._reporter = reporter
        self._errors = errors
        self._saving: list[int] = []

    def __bool__(self) -> bool:
        """Returns True if a request keeps its blocks for a save that has not started."""
        return bool(self._saving)

    def ended(self, request: LlmRequest) -> bool:
        """Returns True if `request`, which ended and holds blocks, is to keep them for a save.

        An error of the connector, or a wrong answer, is kept and ends the request.
        """
        keep = False
        with self._errors.kept(request):
            keep = self._keeps(request)
        if keep:
            self._saving.append(request.request_id)
        return keep

    def start(self) -> tuple[int, ...]:
        """Starts the saves of requests that ended since the last call, and returns their ids."""
        saving, self._saving = tuple(self._saving), []
        for request_id in saving:
            self._ledger.start_save(request_id)
        return saving

    def _keeps(self, request: LlmRequest) -> bool:
        scheduler = self._scheduler
        if self._ledger.may_save(request, self._saving):
            block_ids = self._reporter.block_ids(request)
            return checked_keep(scheduler, scheduler.request_finished(request, block_ids))
        warn_once(
            "connector.save.refused",
            f"request {request.request_id}: {type(scheduler).__name__} is not asked to save "
            "it: saves that were not returned in time hold too much of the pool",
        )
        if request.is_finished_normal:  # otherwise this was called at the abort
            scheduler.request_aborted(request)
        return False
