"""Prints a table of all error messages of the code: ``python tests/repository/error_messages.py``.

Read as a whole, it shows which of them do not say what happened, to which value, and what to do.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kvconnect", "backends", "kernels")


class Message(NamedTuple):
    """One ``raise`` with a text; expressions in the text stand in braces."""

    file: str
    line: int
    error: str
    text: str


def text_of(node: ast.expr) -> str | None:
    """Returns the text that `node` makes, expressions in braces; ``None`` for no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (
            "{" + ast.unparse(part.value) + "}"
            if isinstance(part, ast.FormattedValue)
            else part.value
            for part in node.values
        )
        return "".join(map(str, parts))
    return None


def messages() -> Iterator[Message]:
    """Yields the messages of all modules, in the order of their files and lines."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = file.relative_to(ROOT).as_posix()
            if name.startswith(("kvconnect/backends/", "kvconnect/kernels/")):
                continue  # links to the other two folders
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                    continue
                text = " | ".join(filter(None, map(text_of, node.exc.args)))
                if text:
                    yield Message(name, node.lineno, ast.unparse(node.exc.func), text)


if __name__ == "__main__":
    for one in messages():
        print(f"{one.file}:{one.line}\t{one.error}\t{one.text}")
