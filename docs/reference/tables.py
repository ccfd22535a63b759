"""Writes ``settings.md`` and ``errors.md`` from the code: ``python docs/reference/tables.py``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from kvconnect import errors
from kvconnect.cache_options import CacheOptions
from kvconnect.config import (
    KvCacheConfig,
    KvCacheConnectorConfig,
    KvCacheRetentionConfig,
    TokenRangeRetentionConfig,
    TransferConfig,
)
from kvconnect.settings import Settings

HERE = Path(__file__).parent
BLANK_LINE = "\n\n"
CLASSES: tuple[type[Settings], ...] = (
    KvCacheConnectorConfig,
    KvCacheConfig,
    CacheOptions,
    KvCacheRetentionConfig,
    TokenRangeRetentionConfig,
    TransferConfig,
)
NEXT = {
    errors.ConfigurationError: "fix the setting or the input, then try again",
    errors.RetryLater: "try the same call again later",
    errors.Recompute: "nothing: kvconnect computes the tokens instead",
    errors.UsageError: "fix the calling code",
}

SETTINGS = """\
# Settings

Each class refuses an unknown field and names the nearest valid one. Each takes a dict of its fields wherever an
argument takes the class. Arguments of `LLM` are in its docstring; parameters of store URLs are in
[stores.md](../stores.md), sampling parameters in [generate.md](generate.md#sampling).

`python docs/reference/tables.py` writes this page from the code, in a checkout.
"""

ERRORS = """\
# Errors

Every error that kvconnect raises on purpose is a `KvConnectError`, of one of four kinds. The kind says what to do
next. Names are those of `kvconnect.errors`.

`python docs/reference/tables.py` writes this page from the code, in a checkout.
"""


def markdown(text: str) -> str:
    """Returns the text of a docstring as Markdown, on one line that a cell of a table may hold."""
    bare = re.sub(r"``(.+?)``", r"`\1`", re.sub(r"\s+", " ", text.strip()))
    return bare.replace("|", "\\|")


def fields(cls: type[Settings]) -> dict[str, str]:
    """Returns the explanation of each field in the docstring of `cls`, by name, in its order."""
    body = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w[\w, ]*): (.+(?:\n {8}.+)*)", body, re.MULTILINE)
    return {name: markdown(text) for names, text in found for name in names.split(", ")}


def default(cls: type[Settings], name: str) -> str:
    """Returns the default of a field as a cell; empty if a value is required."""
    field = cls.model_fields[name]
    if field.is_required():
        return "required"
    value = field.default
    if value is None or value == ():
        return "none"
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value >> 20} MiB"
    return f"`{str(value).removesuffix('.0')}`"


def settings_page() -> str:
    """Returns the page of settings."""
    parts = [SETTINGS]
    for cls in CLASSES:
        summary = (inspect.getdoc(cls) or "").partition("\n")[0]
        rows = "\n".join(
            f"| `{name}` | {default(cls, name)} | {text} |" for name, text in fields(cls).items()
        )
        parts.append(
            f"## {cls.__name__}\n\n{markdown(summary)}\n\n"
            f"| field | default | meaning |\n|---|---|---|\n{rows}\n"
        )
    return "\n".join(parts)


def below(cls: type[Exception]) -> Iterator[type[Exception]]:
    """Yields the exported classes below `cls`, depth first, as `errors` lists them."""
    for name in errors.__all__:
        found = getattr(errors, name)
        if inspect.isclass(found) and found.__bases__[0] is cls:
            yield found
            yield from below(found)


def reason(cls: type[Exception]) -> str:
    """Returns the first paragraph of an error's docstring, as what it is raised for."""
    paragraph = (inspect.getdoc(cls) or "").partition(BLANK_LINE)[0]
    return markdown(paragraph.removeprefix("The error of "))


def errors_page() -> str:
    """Returns the page of errors."""
    parts = [ERRORS]
    for kind, action in NEXT.items():
        rows = "\n".join(f"| `{one.__name__}` | {reason(one)} |" for one in below(kind))
        others = [base.__name__ for base in kind.__bases__[1:]]
        also = f" Also a `{others[0]}`." if others else ""
        parts.append(
            f"## {kind.__name__}\n\nWhat to do: {action}.{also}\n\n"
            f"| error | raised for |\n|---|---|\n{rows}\n"
        )
    return "\n".join(parts)


PAGES = {"settings.md": settings_page, "errors.md": errors_page}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (HERE / page).write_text(make(), encoding="utf-8")
