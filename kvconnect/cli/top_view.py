"""The view of ``kvconnect top``, made of rich's tables. Needs the extra ``top``."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvconnect.backends.url import format_size
from kvconnect.explain.outcome import LOST
from kvconnect.prometheus.overview import Overview, StoreNumbers
from kvconnect.text import printable

_BREAKER = ("in use", "probed", "left alone")
_BAR = 24


def view(
    name: str, now: Overview, earlier: Overview | None, problem: str | None = None
) -> RenderableType:
    """Returns the numbers as a renderable of rich.

    Args:
        name: of the server or store.
        now: the numbers.
        earlier: those before, for rates; ``None``: there are none yet.
        problem: why `now` could not be read again.
    """
    parts = [_title(name, now, problem)]
    if now.engine is not None:
        parts += [_prompts(now, earlier), _outcomes(now)]
    return Group(*parts, _stores(now, earlier))


def _title(name: str, now: Overview, problem: str | None) -> RenderableType:
    title = Text.assemble(
        ("kvconnect top  ", "bold"),
        printable(name),
        (f"   {printable(now.engine)}" if now.engine else "", "dim"),
        (time.strftime("   %H:%M:%S", time.localtime(now.at)), "dim"),
    )
    if problem is not None:
        title.append(f"\n{printable(problem)}", "red")
    return title


def _prompts(now: Overview, earlier: Overview | None) -> Table:
    table = _table("", "hit rate", "ceiling", "prompt tokens", "reused", "lost", "requests")
    table.add_row("since its start", *_counts(now))
    if earlier is not None:
        seconds = now.at - earlier.at
        table.add_row(f"last {seconds:.0f} s", *_counts(now, earlier))
    live = ", ".join(f"{count} {state}" for state, count in now.live_requests.items() if count)
    table.caption = Text(f"running: {printable(live) or 'none'}", "dim")
    return table


def _counts(now: Overview, earlier: Overview | None = None) -> Iterator[str]:
    """Yields the numbers, or what they grew by; one that fell, after a restart, counts as 0."""
    before = Overview() if earlier is None else earlier

    def grown(field: str) -> float:
        return max(0.0, float(getattr(now, field) - getattr(before, field)))

    prompts = grown("prompt_tokens")
    for part in ("reused_tokens", "ceiling_tokens"):
        yield f"{100 * grown(part) / prompts:.1f} %" if prompts else "-"
    for field in ("prompt_tokens", "reused_tokens", "lost_tokens", "requests"):
        yield f"{grown(field):,.0f}"


def _outcomes(now: Overview) -> Table:
    table = _table("prompt tokens", "tokens", "share", "")
    table.columns[-1].justify = "left"
    found = sorted(now.outcomes.items(), key=lambda one: -one[1])
    for outcome, tokens in found:
        if tokens:
            style = "yellow" if outcome in LOST else "green" if outcome == "reused" else "dim"
            share = tokens / now.prompt_tokens
            bar = ProgressBar(1.0, share, width=_BAR, complete_style=style, finished_style=style)
            table.add_row(Text(printable(outcome)), f"{tokens:,}", f"{100 * share:.1f} %", bar)
    return table


def _stores(now: Overview, earlier: Overview | None) -> Table:
    if now.engine is None:
        table = _table("tier", "holds", "capacity", "blocks", "pinned")
        for one in now.stores:
            table.add_row(
                _name(one),
                _size(one.used_bytes),
                _size(one.capacity_bytes),
                _whole(one.blocks),
                _size(one.pinned_bytes),
            )
        return table
    table = _table(
        *("tier", "holds", "capacity", "reused tokens", "read", "read/s", "written", "written/s"),
        *("misses", "failures", "state"),
    )
    used, free = (now.device_blocks.get(state, 0) for state in ("used", "free"))
    hits = now.hit_tokens
    table.add_row(
        "device", f"{used:,} blocks", f"{used + free:,} blocks", _whole(hits.get("device", 0))
    )
    if hits.get("host"):
        table.add_row("host", "", "", _whole(hits["host"]))
    table.add_row("stores", "", "", _whole(hits.get("store", 0)))
    before = {(one.store, one.place): one for one in earlier.stores} if earlier else {}
    for one in now.stores:
        seconds = now.at - earlier.at if earlier else 0.0
        last = before.get((one.store, one.place))
        table.add_row(
            _name(one),
            _size(one.used_bytes),
            _size(one.capacity_bytes),
            "",
            _size(one.loaded_bytes or 0),
            _rate(one.loaded_bytes, last.loaded_bytes if last else None, seconds),
            _size(one.saved_bytes or 0),
            _rate(one.saved_bytes, last.saved_bytes if last else None, seconds),
            _whole(one.misses or 0),
            _whole(one.failures or 0),
            _BREAKER[min(2, one.breaker_state or 0)],
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE, caption_justify="left", header_style="dim", pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _name(one: StoreNumbers) -> Text:
    return Text.assemble(
        printable(one.store).removesuffix("Backend"), ("  " + printable(one.place), "dim")
    )


def _rate(now: int | None, earlier: int | None, seconds: float) -> str:
    if seconds <= 0 or earlier is None:
        return "-"
    return f"{_size(max(0, (now or 0) - earlier) / seconds)}/s"


def _size(value: float | None) -> str:
    return "-" if value is None else format_size(int(value))


def _whole(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
