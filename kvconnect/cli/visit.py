"""The positional argument of a command that names a store."""

from __future__ import annotations

import argparse

__all__ = ["add_url"]


def add_url(parser: argparse.ArgumentParser, name: str = "url") -> None:
    """Adds the positional argument that names a store."""
    parser.add_argument(
        name, metavar=name.upper(), help="of a store, as in disk:///var/cache/kv or redis://host"
    )
