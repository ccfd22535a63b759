"""The argument of a command that names a store, and the option that names its tenants."""

from __future__ import annotations

import argparse

from kvconnect.cli.command import Options

__all__ = ["add_tenants", "add_url"]


def add_url(parser: argparse.ArgumentParser, name: str = "url") -> None:
    """Adds the positional argument that names a store."""
    parser.add_argument(
        name, metavar=name.upper(), help="of a store, as in disk:///var/cache/kv or redis://host"
    )


def add_tenants(parser: Options, where: str) -> None:
    """Adds the option of the file with the names of tenants, shown `where`."""
    parser.add_argument(
        "--tenants",
        metavar="FILE",
        help=f'names for {where}: a JSON object, {{"digest of the salt": "name"}}',
    )
