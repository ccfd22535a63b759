"""Finds the reasons why prompt tokens are computed and not reused, from a bounded memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from math import ceil

import numpy as np
import numpy.typing as npt

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.io.open_store import store_ttl_s
from kvconnect.engine.model.sequence_step import first_scheduled_token
from kvconnect.explain.key_memory import DistinctKeys, Fingerprinter, Fingerprints, KeyMemory, mixed
from kvconnect.explain.outcome import NotSaved, Outcome, Span
from kvconnect.keys import Namespace, salt_tag
from kvconnect.request import LlmRequest, ScheduledBatch
from kvconnect.weak import weakly

_STATES = ("", *NotSaved)
"""Why a block was not saved; the first one: it was, or there is no store."""
_STATE_BITS = 4
_LATEST = (1 << 32 - _STATE_BITS) - 1
_MOST_NAMESPACES = 4096


class Explainer:
    """Explains the prompts of one engine. Belongs to the engine's thread.

    A prompt is explained when it is admitted for the first time. Its blocks are remembered when its
    request ends: as computed, and whether they were saved. Memory is bounded by about 6 MiB, whose
    pages are touched as blocks are added. Generated tokens cost nothing.

    Args:
        kv: knows what is cached now.
        connector: the connector of the engine; ``None``: there is no store.
        reuses: true if the engine's cache reuses blocks.
        clock: returns seconds.
    """

    def __init__(
        self,
        kv: BaseKVCacheManager,
        connector: KvCacheConnectorConfig | None = None,
        *,
        reuses: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kv = kv
        self._has_store = connector is not None
        self._ttl_s = None if connector is None else store_ttl_s(connector)
        self._remembers = reuses or connector is not None
        self._clock = clock
        self._started = clock()
        self._fingerprints: Fingerprinter | None = None
        self._own = KeyMemory()  # blocks in their namespaces: state, and the end of their time
        self._anywhere = KeyMemory()  # the same tokens in any namespace: the last namespace
        self._distinct = DistinctKeys()
        self._namespaces: list[tuple[bytes, int | str | None, str | int | None]] = []
        self._numbers: dict[bytes, int] = {}
        self._ceiling, self._shown_ceiling = 0.0, 0.0

    # ------------------------------------------------------------------ a request's way

    def admitted(self, batch: ScheduledBatch) -> None:
        """Explains the requests of `batch` that were admitted for the first time."""
        for requests in (batch.context_requests, batch.loading_requests):
            for request in requests:
                account = request.account
                if not account.is_explained:
                    self._explain(request)
                if not request.num_external_tokens:
                    account.reach(request.num_computed_tokens, reused=True)

    def computed(self, request: LlmRequest) -> None:
        """Records that a step has computed the scheduled prompt tokens of `request`.

        A load within the step has filled the tokens before them.
        """
        start = first_scheduled_token(request)
        request.account.reach(start, reused=True)
        request.account.reach(start + request.num_scheduled_tokens, reused=False)

    def ended(self, request: LlmRequest) -> dict[str, float]:
        """Records the blocks of the ended `request`; returns the number of its tokens by outcome.

        The keys are ``<outcome>_tokens``, and ``ceiling_tokens``: the tokens that a cache without
        limits would have reused, by an estimate.
        """
        account = request.account
        counts: dict[str, float] = {}
        for span in account.spans():
            name = f"{span.outcome}_tokens"
            counts[name] = counts.get(name, 0) + len(span)
        self._remember(request)
        size = request.key_chain.tokens_per_block
        reused = int(counts.get("reused_tokens", 0))
        self._ceiling += account.num_known + reused % size
        grown = max(0.0, self._ceiling - self._shown_ceiling)
        self._shown_ceiling += grown
        return counts | {"ceiling_tokens": grown}

    # ------------------------------------------------------------------ why it is computed

    def _explain(self, request: LlmRequest) -> None:
        account, size = request.account, request.key_chain.tokens_per_block
        base = max(request.num_computed_tokens, request.num_external_tokens, request.load_end)
        last = account.num_tokens - 1
        known = base // size
        account.prints = self._prints(request, account.num_tokens)
        anywhere, own, has_tail = account.prints
        num_full = len(own) - has_tail
        new = self._distinct.add(own[:num_full])
        account.num_known = size * (num_full - new) - (0 if has_tail else new < num_full)
        if not request.may_reuse:
            account.explain(0, (Span(0, last, Outcome.LOGPROBS),))
            return
        if not self._remembers or base >= last:
            account.explain(base, ())
            return
        why = list(self._forgotten(self._own.find(own[known:]), base, size, last))
        at = why[-1].end if why else base
        if at < last:
            why += self._elsewhere(request, anywhere[:num_full], at, last)
            at = why[-1].end if why else base
        if at < last:
            why += self._rest(request, at, last, num_full * size)
        account.explain(base, why)

    def _forgotten(
        self, found: npt.NDArray[np.int64], base: int, size: int, last: int
    ) -> Iterator[Span]:
        """Yields the spans from block `base` to the last block that this engine once had."""
        there = np.flatnonzero(found >= 0)
        if not len(there):
            return
        start, number = base, base // size
        now = self._clock() - self._started
        for value in found[: there[-1] + 1].tolist():
            number += 1
            end = min(number * size, last)
            if end <= start:
                continue
            state = max(0, value) & (1 << _STATE_BITS) - 1
            if state:
                yield Span(start, end, Outcome.NOT_SAVED, _STATES[state])
            elif end == last and number * size > last + 1 and self._has_store:
                yield Span(start, end, Outcome.TAIL)
            elif 0 < value >> _STATE_BITS <= now:
                yield Span(start, end, Outcome.EXPIRED)
            else:
                yield Span(start, end, Outcome.EVICTED)
            start = end

    def _elsewhere(
        self, request: LlmRequest, anywhere: Fingerprints, at: int, last: int
    ) -> Iterator[Span]:
        """Yields the span from `at` on that another namespace once had."""
        size = request.key_chain.tokens_per_block
        mine = self._number(request.namespace)  # first: it may forget all others
        found = self._anywhere.find(anywhere[at // size :])
        there = np.flatnonzero((found >= 0) & (found != mine))
        if len(there):
            end = min((at // size + int(there[-1]) + 1) * size, last)
            other, own = self._namespaces[int(found[there[-1]])], self._namespaces[mine]
            fields = ("cache_salt", "lora_id", "extra_key")
            differing = [field for field, a, b in zip(fields, other, own, strict=True) if a != b]
            if end > at:
                yield Span(at, end, Outcome.NAMESPACE, ", ".join(differing))

    def _rest(self, request: LlmRequest, at: int, last: int, full_end: int) -> Iterator[Span]:
        """Yields the spans from `at` on, which no cache had, as far as recorded."""
        account = request.account
        found = self._kv.nearest_cached(request)
        places = [account.divergence] if account.divergence else []
        if found is not None:
            places.append((found[0], tuple(found[1].tolist())))
        place = max(places, default=None)
        # Part of the block is cached, but cannot be reused.
        if place is not None and place[0] > 0 and at <= place[0] < last:
            account.divergence = place
            yield Span(at, place[0], Outcome.TAIL)
            yield Span(place[0], last, Outcome.DIVERGED)
            return
        account.divergence = None
        loaded = request.num_external_tokens or request.load_end
        if 0 < full_end <= at and loaded >= full_end:
            yield Span(at, last, Outcome.TAIL)

    # ------------------------------------------------------------------ what is remembered

    def _remember(self, request: LlmRequest) -> None:
        account, size = request.account, request.key_chain.tokens_per_block
        num_valid = min(request.num_computed_tokens, request.num_tokens)
        if not num_valid or not self._remembers:
            return
        anywhere, own, has_tail = account.prints or self._prints(request, account.num_tokens)
        prompt_end, num_full = len(own) - has_tail, num_valid // size
        saved = own if num_valid >= account.num_tokens else own[:num_full]
        if num_full > prompt_end:
            tail = saved[prompt_end:]
            anywhere, own, _ = self._prints(request, num_full * size)
            self._distinct.add(own[prompt_end:])
            saved = np.concatenate((own, tail))
        self._anywhere.add(anywhere[:num_full], self._number(request.namespace))
        # A reused block keeps its time.
        first = account.reused_from_start() // size
        computed = saved[first:]
        if first and len(kept := own[:first][self._own.find(own[:first]) < 0]):
            computed = np.concatenate((computed, kept))
        self._own.add(computed, self._end(request))
        if self._has_store:
            # An ended request, which its handle keeps, must not keep the cache.
            account.when_unsaved = partial(weakly(self._not_saved), saved, size)
            if account.unsaved is not None:
                self._not_saved(saved, size, *account.unsaved)

    def _not_saved(self, own: Fingerprints, size: int, position: int, why: NotSaved) -> None:
        self._own.add(own[position // size :], _STATES.index(why))

    def _end(self, request: LlmRequest) -> int:
        """Returns the second at which new blocks of `request` expire in the store; 0: never.

        It is shifted by `_STATE_BITS`.
        """
        times = [one for one in (self._ttl_s, request.account.ttl_s) if one is not None]
        if not times:
            return 0
        end = ceil(self._clock() - self._started + min(times))
        return min(end, _LATEST) << _STATE_BITS

    def _prints(
        self, request: LlmRequest, num_tokens: int
    ) -> tuple[Fingerprints, Fingerprints, bool]:
        """Returns the fingerprints of prefixes, in any namespace and in that of `request`.

        The flag is that of `Fingerprinter.prefixes`.
        """
        if self._fingerprints is None:
            self._fingerprints = Fingerprinter(request.key_chain.tokens_per_block)
        anywhere, has_tail = self._fingerprints.prefixes(request.tokens.view[:num_tokens])
        of_namespace = np.frombuffer(request.namespace.encode(), np.uint64, 1)[0]
        return anywhere, mixed(anywhere ^ of_namespace), has_tail

    def _number(self, namespace: Namespace) -> int:
        digest = namespace.encode()
        number = self._numbers.get(digest)
        if number is None:
            if len(self._namespaces) >= _MOST_NAMESPACES:
                self._anywhere.clear()
                self._namespaces.clear()
                self._numbers.clear()
            number = self._numbers[digest] = len(self._namespaces)
            tag = salt_tag(namespace.cache_salt)
            self._namespaces.append((tag, namespace.lora_id, namespace.extra_key))
        return number
