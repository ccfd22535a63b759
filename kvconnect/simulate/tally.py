"""Counts events over the time of the trace."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

_MOST_BUCKETS = 240


@dataclass(slots=True)
class Counts:
    """The counts of one stretch of time; all but the peaks add up.

    Prompt tokens are those of requests that were admitted in it, and each of them is counted once:
    ``prompt_tokens = device_tokens + host_tokens + external_tokens + computed_tokens``.

    Attributes:
        requests: admitted requests.
        turned_away: requests refused because the queue was full.
        too_long: requests that do not fit the device.
        prompt_tokens: prompt tokens of those admitted.
        output_tokens: generated tokens of those admitted.
        device_tokens: prompt tokens found on the device.
        host_tokens: prompt tokens onboarded from the host.
        external_tokens: prompt tokens loaded from the external tier.
        computed_tokens: the other prompt tokens.
        evicted_blocks: published blocks that were evicted from the device.
        offloaded_blocks: blocks copied from device to host.
        onboarded_blocks: blocks copied from host to device.
        host_copied_tokens: tokens copied from a host block that was not onboarded.
        device_copied_tokens: tokens copied within the device, for matches that end inside a block.
        loaded_blocks: blocks read from the external tier.
        saved_blocks: blocks written to the external tier.
        external_evicted_blocks: blocks evicted from the external tier.
        snapshots: snapshots of recurrent states that were taken.
        no_state_tokens: computed tokens that were cached, but without a snapshot of states.
        waited_s: seconds between arrival and admission, of all requests together.
        longest_wait_s: the longest wait of a request, in seconds.
        most_waiting: the most requests that waited at once.
        most_blocks: the most device blocks held by requests at once.
    """

    requests: int = 0
    turned_away: int = 0
    too_long: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    external_tokens: int = 0
    computed_tokens: int = 0
    evicted_blocks: int = 0
    offloaded_blocks: int = 0
    onboarded_blocks: int = 0
    host_copied_tokens: int = 0
    device_copied_tokens: int = 0
    loaded_blocks: int = 0
    saved_blocks: int = 0
    external_evicted_blocks: int = 0
    snapshots: int = 0
    no_state_tokens: int = 0
    waited_s: float = 0.0
    longest_wait_s: float = 0.0
    most_waiting: int = 0
    most_blocks: int = 0

    @property
    def saved_tokens(self) -> int:
        """The number of prompt tokens that need not be computed."""
        return self.device_tokens + self.host_tokens + self.external_tokens

    def hit_rate(self, tier: str = "saved") -> float:
        """Returns the share of prompt tokens from ``device``, ``host``, ``external`` or all."""
        found: int = getattr(self, f"{tier}_tokens")
        return found / self.prompt_tokens if self.prompt_tokens else 0.0

    def add(self, other: Self) -> None:
        """Adds `other`; of the peaks the higher one stays."""
        for field in fields(self):
            mine, its = getattr(self, field.name), getattr(other, field.name)
            peak = field.name.startswith(("most_", "longest_"))
            setattr(self, field.name, max(mine, its) if peak else mine + its)


class Tally:
    """The counts by time, in at most 240 buckets of equal width whatever the length of the trace.

    Buckets begin a second wide. When a trace runs past the last one, all buckets double in width.

    Attributes:
        width: seconds per bucket.
        buckets: from the beginning of the trace on.
    """

    def __init__(self) -> None:
        self.width = 1.0
        self.buckets = [Counts()]
        self._end = self.width

    def at(self, now: float) -> Counts:
        """Returns the counts for events at `now`, which never decreases."""
        while now >= self._end:
            if now >= _MOST_BUCKETS * self.width:
                self._halve()
            else:
                self.buckets.append(Counts())
                self._end = len(self.buckets) * self.width
        return self.buckets[-1]

    def total(self) -> Counts:
        """Returns the sum of all counts."""
        return self._merged(self.buckets)

    def rows(self, most: int) -> list[tuple[float, float, Counts]]:
        """Returns start, end (seconds) and counts of at most `most` stretches of equal length."""
        group = -(-len(self.buckets) // most)
        rows = []
        for first in range(0, len(self.buckets), group):
            merged = self._merged(self.buckets[first : first + group])
            rows.append((first * self.width, (first + group) * self.width, merged))
        return rows

    def _halve(self) -> None:
        pairs = range(0, len(self.buckets), 2)
        self.buckets = [self._merged(self.buckets[first : first + 2]) for first in pairs]
        self.width *= 2
        self._end = len(self.buckets) * self.width

    @staticmethod
    def _merged(buckets: list[Counts]) -> Counts:
        merged = Counts()
        for bucket in buckets:
            merged.add(bucket)
        return merged
