"""What a module of a subcommand provides."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

__all__ = ["Command", "NothingMatched", "Options", "Subparsers", "add_number", "picked"]

if TYPE_CHECKING:
    # argparse keeps this class to itself, and it takes its parameter only while type checking.
    Subparsers: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001
    Options: TypeAlias = argparse._ActionsContainer  # noqa: SLF001
else:
    Subparsers = Options = argparse.Action


class NothingMatched(Exception):
    """The object of a command does not exist: exit code 3."""


class Command(Protocol):
    """A module listed in `kvconnect.cli.main.COMMANDS`."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Describe the subcommand to its `parser`, with ``set_defaults(run=...)``.

        ``run(arguments)`` does the work and returns nothing. It raises `ConfigurationError` for
        what the user can put right; the message is then all that the user sees. It imports the
        engine itself, so that ``--help`` does not wait for transformers.
        """


def add_number(
    parser: Options,
    option: str,
    about: str | None = None,
    *,
    default: float | None = None,
    type: type[int | float] = int,  # noqa: A002 - as argparse calls it
    metavar: str = "N",
) -> None:
    """Add an `option` that takes a number."""
    parser.add_argument(option, type=type, default=default, metavar=metavar, help=about)


def picked(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options that are called like the keyword arguments they become."""
    return {name: getattr(arguments, name) for name in names}
