"""The interface of a subcommand's module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from kvconnect.errors import ConfigurationError, nearest

__all__ = [
    "Command",
    "NothingMatched",
    "Options",
    "Subparsers",
    "add_number",
    "chosen",
    "picked",
    "require_at_least_one",
    "tell",
]

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
        """Adds the options of the subcommand to its `parser`, with ``set_defaults(run=...)``.

        ``run(arguments)`` does the work and returns nothing. It raises `ConfigurationError` for
        errors that the user can correct; the user sees only its message. It imports the engine
        itself, so that ``--help`` does not wait for transformers.
        """


def add_number(
    parser: Options,
    option: str,
    about: str = "",
    *,
    default: float | None = None,
    metavar: str = "N",
) -> None:
    """Adds an `option` that takes a number: a whole one, unless its default is a ``float``."""
    kind = float if isinstance(default, float) else int
    if default is not None:
        about = f"{about} (default: {f'{default:g}' if kind is float else default})".lstrip()
    parser.add_argument(option, type=kind, default=default, metavar=metavar, help=about or None)


def picked(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Returns the options that are named like the keyword arguments they become."""
    return {name: getattr(arguments, name) for name in names}


def require_at_least_one(arguments: argparse.Namespace, *names: str) -> None:
    """Checks the options that are named like `names`; those without a value pass.

    Raises:
        ConfigurationError: one of them is below 1.
    """
    for name in names:
        number = getattr(arguments, name)
        if number is not None and number < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} {number}: must be at least 1")


def chosen(option: str, given: str, known: Iterable[str]) -> tuple[str, ...]:
    """Returns the names in the value of an `option`, ``"NAME,…"``, each once.

    Raises:
        ConfigurationError: one of them is not `known`.
    """
    valid = set(known)
    names = tuple(dict.fromkeys(given.split(",")))
    for name in names:
        if name not in valid:
            raise ConfigurationError(f"{option} {name}: {nearest(name, valid)}")
    return names


def tell(what: str) -> None:
    """Prints a line about progress on standard error."""
    print(f"kvconnect: {what}", file=sys.stderr, flush=True)
