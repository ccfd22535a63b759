"""Shows texts of models on a terminal, which would obey their control characters."""

from __future__ import annotations

import re
from typing import TextIO

__all__ = ["shown_on"]

# All of C0 and C1 but tabs and ends of lines. A carriage return alone lets a line overwrite itself.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


def shown_on(stream: TextIO, text: str) -> str:
    r"""Returns `text` as it is to be written to `stream`.

    On a terminal, control characters but tabs and ends of lines are escaped (``\x1b``). Files and
    pipes get `text` unchanged, since programs read them.
    """
    if not stream.isatty():
        return text
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
