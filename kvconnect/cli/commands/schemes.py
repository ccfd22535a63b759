"""The command ``kvconnect schemes``: lists the URL schemes of stores."""

from __future__ import annotations

import argparse
import inspect
import json
from dataclasses import asdict, dataclass

from kvconnect.backends.registry import factory_of, schemes
from kvconnect.cli.command import add_json
from kvconnect.errors import MissingExtra


@dataclass(frozen=True, slots=True)
class _Scheme:
    """A scheme, with a sentence about its store, or the extra that must be installed first."""

    scheme: str
    module: str | None
    about: str | None
    missing: str | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``schemes``."""
    parser.description = (
        "List the URL schemes that stores can be opened by here, those of other packages too, and "
        "what must be installed for those that cannot be used yet."
    )
    add_json(parser, "scheme")


def run(arguments: argparse.Namespace) -> None:
    """Prints the list."""
    for name in schemes():
        one = _found(name)
        if arguments.json:
            print(json.dumps(asdict(one)))
        else:
            print(f"{name + ':':<16} {one.missing or one.about or one.module}")


def _found(name: str) -> _Scheme:
    try:
        factory = factory_of(name)
    except MissingExtra as error:
        return _Scheme(name, None, None, str(error))
    module = inspect.getmodule(factory)
    about = inspect.getdoc(module) or ""
    return _Scheme(name, factory.__module__, about.partition("\n\n")[0].replace("\n", " ") or None)
