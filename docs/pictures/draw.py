"""Draws the pictures of the pages from the JSON files beside it: ``python docs/pictures/draw.py``.

`block.json` has the parts and the way of a block, `restart.json` and `crossover.json` figures of
docs/benchmarks.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HEIGHT = 70
INK = "#222222"
COLORS = {"computed": "#a4243b", "restored": "#6a994e", "floor": "#9a9a9a", "loaded": "#33658a"}
PANEL = (330, 190)
"""Width and height of a curve's panel."""


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "start") -> str:
    """Returns one line of text."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{INK}">'
        f"{escape(words)}</text>"
    )


def picture(width: int, height: int, title: str, parts: Iterator[str]) -> str:
    """Returns an SVG with a white ground, which dark pages need."""
    marker = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        f'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="Helvetica, Arial, sans-serif">'
    )
    ground = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", marker, ground, *parts, "</svg>\n"])


def way_of_a_block(data: dict[str, Any]) -> Iterator[str]:
    """Yields the boxes, the numbered arrows between them, and the notes."""
    boxes = {box["name"]: box for box in data["boxes"]}
    for box in boxes.values():
        x, y, width = box["x"], box["y"], box["width"]
        yield (
            f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="6" '
            f'fill="{box["color"]}" stroke="{INK}"/>'
        )
        first = y + HEIGHT / 2 + 5 - 9 * (len(box["lines"]) - 1)
        for number, line in enumerate(box["lines"]):
            yield text(x + width / 2, first + 18 * number, line, 12 if number else 15, "middle")
    for arrow in data["arrows"]:
        ends = [
            boxes[arrow[side]]["x"] + boxes[arrow[side]]["width"] / 2 for side in ("from", "to")
        ]
        y = arrow["y"]
        yield (
            f'<path d="M{ends[0]:g} {y} H{ends[1]:g}" stroke="{INK}" stroke-width="1.5" '
            'marker-end="url(#tip)"/>'
        )
        yield text(sum(ends) / 2, y - 7, arrow["text"], anchor="middle")
    for note in data["notes"]:
        yield text(note["x"], note["y"], note["text"])


def bars(data: dict[str, Any]) -> Iterator[str]:
    """Yields three bars of each run: computed, restored, and the floor if it was measured."""
    scale = 560 / max(run["computed_ms"] for run in data["runs"])
    yield text(20, 28, data["title"], 16)
    yield text(20, 48, data["machine"], 12)
    y = 76
    for run in data["runs"]:
        yield text(20, y, f"{run['command']}: {run['prompt_tokens']:,} tokens ({run['day']})")
        floor = run["floor_ms"] and sum(run["floor_ms"])
        for name, value in (
            ("computed", run["computed_ms"]),
            ("restored", run["restored_ms"]),
            ("floor", floor),
        ):
            if value is None:
                continue
            y += 20
            yield text(100, y, name, 12, "end")
            yield (
                f'<rect x="110" y="{y - 12}" width="{value * scale:.1f}" height="14" '
                f'fill="{COLORS[name]}"/>'
            )
            yield text(118 + value * scale, y, f"{value:,.1f}", 12)
        y += 34


def curves(data: dict[str, Any]) -> Iterator[str]:
    """Yields a panel for each prompt and latency: three times over the speed of the store."""
    yield text(20, 28, data["title"], 16)
    yield text(20, 48, f"{data['machine']}; {data['command']} ({data['day']})", 12)
    for number, (name, words) in enumerate(data["legend"].items()):
        yield f'<rect x="{20 + 260 * number}" y="60" width="14" height="14" fill="{COLORS[name]}"/>'
        yield text(40 + 260 * number, 72, words, 12)
    for number, panel in enumerate(data["panels"]):
        across, down = number % 2, number // 2
        yield from _panel(panel, 50 + across * (PANEL[0] + 50), 110 + down * (PANEL[1] + 70))


def _panel(panel: dict[str, Any], left: float, top: float) -> Iterator[str]:
    """Yields the axes and curves of a panel; times beyond twice the computed one are cut off."""
    width, height = PANEL
    speeds = panel["speeds"]
    first, last = math.log2(speeds[0]), math.log2(speeds[-1])
    most = 2 * max(panel["computed_ms"])

    def at(speed: float, milliseconds: float) -> str:
        x = left + width * (math.log2(speed) - first) / (last - first)
        return f"{x:.1f},{top + height * (1 - min(milliseconds, most) / most):.1f}"

    yield text(left, top - 8, panel["title"], 13)
    yield (
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" '
        f'stroke="{COLORS["floor"]}"/>'
    )
    for value in (0, most / 2, most):
        y = top + height * (1 - value / most)
        yield text(left - 6, y + 4, f"{value:.0f}", 11, "end")
    for speed in speeds:
        x = float(at(speed, 0).split(",")[0])
        yield text(
            x, top + height + 16, f"{speed:g}" if speed >= 1 else f"1/{1 / speed:g}", 11, "middle"
        )
    for name in ("computed", "loaded", "restored"):
        points = [at(*one) for one in zip(speeds, panel[f"{name}_ms"], strict=True)]
        yield (
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{COLORS[name]}" '
            f'stroke-width="{3 if name == "restored" else 2}"/>'
        )


def draw(name: str) -> str:
    """Returns the picture of ``name.json`` as SVG."""
    data = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    if name == "block":
        return picture(1010, 320, data["title"], way_of_a_block(data))
    if name == "crossover":
        return picture(800, 620, data["title"], curves(data))
    return picture(760, 335, data["title"], bars(data))


if __name__ == "__main__":
    for one in ("block", "restart", "crossover"):
        (HERE / f"{one}.svg").write_text(draw(one), encoding="utf-8")
