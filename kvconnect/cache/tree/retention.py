"""The retention that each block of a sequence gets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvconnect.config import DEFAULT_RETENTION_PRIORITY, KvCacheRetentionConfig


class Retention(NamedTuple):
    """The retention of a block: a priority 0..100 for `duration` seconds, ``None`` for ever."""

    priority: int
    duration: float | None = None


DEFAULT_RETENTION = Retention(DEFAULT_RETENTION_PRIORITY)


class RetentionRun(NamedTuple):
    """The retention of blocks ``start..stop`` of a sequence.

    Attributes:
        requested: whether the request set the retention; if not, it is the default.
        inherited: whether the blocks get, in each pool, the retention of the copied source block.
    """

    start: int
    stop: int
    retention: Retention
    requested: bool = False
    inherited: bool = False


class RetentionPlan:
    """The retention of every block of one sequence, by block number.

    The requested range with a block's first token decides the block's retention. Blocks whose first
    token was generated get the decode retention. Only `inherit` and `rewind` change the plan.
    """

    __slots__ = ("_decode", "_first_decoded", "_inherited", "_ranges")

    def __init__(
        self, config: KvCacheRetentionConfig | None, prompt_len: int, tokens_per_block: int
    ) -> None:
        self._first_decoded = -(-prompt_len // tokens_per_block)
        self._ranges: list[RetentionRun] = []
        self._decode: Retention | None = None
        self._inherited: int | None = None
        if config is None:
            return
        self._decode = Retention(
            config.decode_retention_priority, _seconds(config.decode_duration_ms)
        )
        ordered = sorted(config.token_range_retention_configs, key=lambda r: r.token_start)
        for given in ordered:
            end = prompt_len if given.token_end is None else min(given.token_end, prompt_len)
            start, stop = -(-given.token_start // tokens_per_block), -(-end // tokens_per_block)
            if start < stop:
                retention = Retention(given.priority, _seconds(given.duration_ms))
                self._ranges.append(RetentionRun(start, stop, retention, requested=True))

    def requested(self, start: int, stop: int) -> list[RetentionRun]:
        """Returns the runs of prompt blocks in ``start..stop`` whose retention the request sets."""
        found: list[RetentionRun] = []
        for run in self._ranges:
            low, high = max(run.start, start), min(run.stop, stop)
            if low < high:
                found.append(RetentionRun(low, high, run.retention, requested=True))
        return found

    def inherit(self, block: int) -> None:
        """Makes `block`, a copy, inherit its source's retention, unless the request sets one."""
        if not self.requested(block, block + 1):
            self._inherited = block

    def rewind(self, num_blocks: int) -> None:
        """Counts all tokens after the first `num_blocks` blocks as generated from now on."""
        self._first_decoded = min(self._first_decoded, num_blocks)

    def runs(self, start: int, stop: int) -> Iterator[RetentionRun]:
        """Yields all blocks ``start..stop``, in order, as runs of equal retention."""
        at = start
        if self._ranges or self._decode is not None or self._inherited is not None:
            for run in self._set(start, stop):
                if at < run.start:
                    yield RetentionRun(at, run.start, DEFAULT_RETENTION)
                yield run
                at = run.stop
        if at < stop:
            yield RetentionRun(at, stop, DEFAULT_RETENTION)

    def _set(self, start: int, stop: int) -> Iterator[RetentionRun]:
        prompt_stop = min(stop, self._first_decoded)
        runs = self.requested(start, prompt_stop)
        block = self._inherited
        if block is not None and start <= block < prompt_stop:
            runs.append(RetentionRun(block, block + 1, DEFAULT_RETENTION, inherited=True))
            runs.sort()
        yield from runs
        low = max(start, self._first_decoded)
        if low < stop and self._decode is not None:
            yield RetentionRun(low, stop, self._decode, requested=True)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
