"""What a module of a subcommand provides."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Protocol, TypeAlias

__all__ = ["Command", "Subparsers"]

if TYPE_CHECKING:
    # argparse keeps this class to itself, and it takes its parameter only while type checking.
    Subparsers: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001
else:
    Subparsers = argparse.Action


class Command(Protocol):
    """A module listed in `kvconnect.cli.main.COMMANDS`."""

    def add_parser(self, subparsers: Subparsers) -> None:
        """Add the subcommand's parser, with ``set_defaults(run=...)``.

        ``run(arguments)`` does the work and returns nothing. It raises `ConfigurationError` for
        what the user can put right; the message is then all that the user sees. It imports the
        engine itself, so that ``--help`` does not wait for transformers.
        """
