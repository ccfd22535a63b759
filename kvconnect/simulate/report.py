"""The results of a simulation: tables for people, JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvconnect.backends.url import format_size
from kvconnect.simulate.first_token import ExternalHit, FirstTokens, LoadRates, first_token_rows
from kvconnect.simulate.machine import Machine
from kvconnect.simulate.tally import Counts, Tally

TIERS = ("device", "host", "external")

_MOST_ROWS = 12
_MOVES = (
    ("device to host", "offloaded_blocks", None),
    ("host to device", "onboarded_blocks", "host_copied_tokens"),
    ("external to device", "loaded_blocks", None),
    ("device to external", "saved_blocks", None),
    ("within the device", None, "device_copied_tokens"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """A machine and its counts.

    Attributes:
        machine: the machine of which these are the counts.
        tally: the counts.
        label: the size that a sweep gave it.
        hits: the prompts that were partly in the external tier; empty if loads are not timed.
    """

    machine: Machine
    tally: Tally
    label: str = ""
    hits: Sequence[ExternalHit] = ()

    def capacity(self, tier: str) -> int:
        """Returns how many tokens fit `tier`."""
        blocks: int = getattr(self.machine, f"{tier}_blocks")
        return blocks * self.machine.tokens_per_block

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers of the machine."""
        return tuple(tier for tier in TIERS if self.capacity(tier))


@dataclass(frozen=True, slots=True)
class Report:
    """The runs over one trace.

    Attributes:
        trace: the name of the trace.
        requests_read: the number of requests read from the trace.
        trace_s: seconds from the first request that was read to the last one.
        interrupted: true if the trace was not read to its end, or a request has not finished.
        runs: the runs, at least one.
        token_nbytes: KV bytes per token; ``None``: not known.
        swept: the tier whose size differs from run to run; ``None``: there is one run.
        rates: the rates for the times of loads; empty if loads are not timed.
    """

    trace: str
    requests_read: int
    trace_s: float
    interrupted: bool
    runs: Sequence[Run]
    token_nbytes: int | None = None
    swept: str | None = None
    rates: Sequence[LoadRates] = ()

    def text(self) -> str:
        """Returns the results as tables."""
        head = f"{self.trace}: {self.requests_read:,} requests, {_time(self.trace_s)}"
        if self.interrupted:
            head += " (interrupted: the figures are those up to here)"
        parts = [head]
        if self.swept is None:
            run = self.runs[0]
            parts += [self._prompt(run), self._machine(run), self._moved(run), self._timeline(run)]
        else:
            parts.append(self._sweep(self.swept))
        if self.rates:
            parts += [self._first_tokens(run) for run in self.runs]
        return "\n\n".join(parts)

    def json(self) -> str:
        """Returns one JSON object; rates are shares of 1, lengths tokens, times seconds."""
        runs = []
        for run in self.runs:
            total = run.tally.total()
            timed = {"first_token": self._first_tokens_json(run)} if self.rates else {}
            runs.append(
                {
                    "label": run.label,
                    "machine": {
                        name: None if value == math.inf else value
                        for name, value in run.machine.model_dump().items()
                    },
                    "total": _counts(total),
                    "moved_bytes": self._moved_bytes(run, total),
                    "over_time": [
                        {"start_s": start, "end_s": end, **_counts(counts)}
                        for start, end, counts in run.tally.rows(len(run.tally.buckets))
                    ],
                    **timed,
                }
            )
        return json.dumps(
            {
                "trace": self.trace,
                "requests_read": self.requests_read,
                "trace_s": self.trace_s,
                "interrupted": self.interrupted,
                "bytes_per_token": self.token_nbytes,
                "swept": self.swept,
                "runs": runs,
            }
        )

    def moved_tokens(self, run: Run, counts: Counts) -> list[tuple[str, int]]:
        """Returns the tokens moved between the tiers of `run`; a moved block counts whole."""
        found = []
        for name, blocks, tokens in _MOVES:
            if all(tier in run.tiers for tier in name.split() if tier in TIERS):
                moved = getattr(counts, blocks) * run.machine.tokens_per_block if blocks else 0
                found.append((name, moved + (getattr(counts, tokens) if tokens else 0)))
        return found

    # ---------------------------------------------------------------- tables

    def _prompt(self, run: Run) -> str:
        total = run.tally.total()
        rows = [("prompts", total.prompt_tokens)]
        rows += [(f"  from {tier}", getattr(total, f"{tier}_tokens")) for tier in run.tiers]
        rows += [("  computed", total.computed_tokens), ("saved", total.saved_tokens)]
        whole = max(total.prompt_tokens, 1)
        lines = [("", "tokens", "share")]
        lines += [(name, f"{tokens:,}", _percent(tokens / whole)) for name, tokens in rows]
        return _table(lines)

    def _machine(self, run: Run) -> str:
        total, machine = run.tally.total(), run.machine
        sizes = [
            f"{tier} {getattr(machine, f'{tier}_blocks'):,} blocks ({self._size(run, tier)})"
            for tier in run.tiers
        ]
        held = total.most_blocks / machine.device_blocks
        wait = total.waited_s / max(total.requests, 1)
        lines = [f"{', '.join(sizes)}; {machine.tokens_per_block} tokens per block"]
        lines.append(
            f"requests: {total.requests:,} served, {total.turned_away:,} turned away, "
            f"{total.too_long:,} too long for the device"
        )
        lines.append(
            f"waiting: {wait:.3g} s on average, {total.longest_wait_s:.3g} s at most, "
            f"{total.most_waiting:,} requests at once"
        )
        lines.append(f"held at once: {total.most_blocks:,} blocks, {_percent(held)} of the device")
        if machine.state_blocks:
            lines.append(
                f"states: one per {machine.state_interval:,} tokens, as large as "
                f"{machine.state_blocks:,} blocks; {total.snapshots:,} taken, "
                f"{total.no_state_tokens:,} cached tokens computed without one"
            )
        evicted = f"evicted from device: {total.evicted_blocks:,} blocks"
        if machine.external_blocks:
            evicted += f"; from external: {total.external_evicted_blocks:,} blocks"
        return "\n".join([*lines, evicted])

    def _moved(self, run: Run) -> str:
        moved = self.moved_tokens(run, run.tally.total())
        rows = [(f"  {name}", f"{tokens:,}", self._bytes(tokens)) for name, tokens in moved]
        return _table([("moved", "tokens", "bytes"), *rows])

    def _timeline(self, run: Run) -> str:
        lines = [("from", "requests", "prompt tokens", *run.tiers, "all", "evicted", "waiting")]
        for start, _, counts in run.tally.rows(_MOST_ROWS):
            rates = [_percent(counts.hit_rate(tier)) for tier in (*run.tiers, "saved")]
            lines.append(
                (
                    _time(start),
                    f"{counts.requests:,}",
                    f"{counts.prompt_tokens:,}",
                    *(rates if counts.prompt_tokens else ["-"] * len(rates)),
                    f"{counts.evicted_blocks:,}",
                    f"{counts.most_waiting:,}",
                )
            )
        return _table(lines)

    def _sweep(self, swept: str) -> str:
        tiers = tuple(tier for tier in TIERS if any(tier in run.tiers for run in self.runs))
        lines = [
            (swept, "tokens fit", *tiers, "all", "computed", "evicted", "moved", "turned away",
             "mean wait")
        ]  # fmt: skip
        for run in self.runs:
            total = run.tally.total()
            moved = sum(tokens for _, tokens in self.moved_tokens(run, total))
            lines.append(
                (
                    run.label,
                    f"{run.capacity(swept):,}",
                    *(_percent(total.hit_rate(tier)) for tier in (*tiers, "saved")),
                    f"{total.computed_tokens:,}",
                    f"{total.evicted_blocks:,}",
                    f"{moved:,} tokens" if self.token_nbytes is None else self._bytes(moved),
                    f"{total.turned_away + total.too_long:,}",
                    f"{total.waited_s / max(total.requests, 1):.3g} s",
                )
            )
        return _table(lines)

    def _first_tokens(self, run: Run) -> str:
        at = "" if self.swept is None else f"{self.swept} {run.label}: "
        if not run.hits:
            return f"{at}no prompt had a part in the store"
        found = [FirstTokens.of(rates, run.hits) for rates in self.rates]
        tokens = sum(hit.tokens for hit in run.hits)
        head = f"{at}{len(run.hits):,} prompts had {tokens:,} tokens in the store"
        return f"{head}\n{_table(first_token_rows(found))}"

    # ---------------------------------------------------------------- figures

    def _first_tokens_json(self, run: Run) -> list[dict[str, object]]:
        return [FirstTokens.of(rates, run.hits).record() for rates in self.rates if run.hits]

    def _moved_bytes(self, run: Run, counts: Counts) -> dict[str, int] | None:
        if self.token_nbytes is None:
            return None
        moved = self.moved_tokens(run, counts)
        return {name.replace(" ", "_"): tokens * self.token_nbytes for name, tokens in moved}

    def _size(self, run: Run, tier: str) -> str:
        tokens = run.capacity(tier)
        return f"{tokens:,} tokens" if self.token_nbytes is None else self._bytes(tokens)

    def _bytes(self, tokens: int) -> str:
        return "-" if self.token_nbytes is None else format_size(tokens * self.token_nbytes)


def _counts(counts: Counts) -> dict[str, float]:
    found = asdict(counts) | {"saved_tokens": counts.saved_tokens}
    found |= {f"{tier}_hit_rate": counts.hit_rate(tier) for tier in TIERS}
    return found | {"hit_rate": counts.hit_rate()}


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _time(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _table(lines: Sequence[Sequence[str]]) -> str:
    """Aligns columns at their least width: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = []
    for first, *others in lines:
        cells = [first.ljust(widths[0])]
        cells += [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        rows.append("  ".join(cells).rstrip())
    return "\n".join(rows)
