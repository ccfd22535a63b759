"""The interface of a subcommand's module, and the options that several subcommands have."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from kvconnect.backends.url import parse_duration
from kvconnect.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    # A private class of argparse, which accepts its type parameter only for type checkers.
    Subparsers: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001
    Options: TypeAlias = argparse._ActionsContainer  # noqa: SLF001
else:
    Subparsers = Options = argparse.Action


class NothingMatched(Exception):
    """The error that the object of a command does not exist: exit code 3."""


class Command(Protocol):
    """A module listed in `kvconnect.cli.main.COMMANDS`."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Adds the options of the subcommand to its `parser`; an epilog is shown as it is."""

    def run(self, arguments: argparse.Namespace) -> None:
        """Does the work.

        It raises `ConfigurationError` for errors that the user can correct; the user sees only its
        message. It imports the engine itself, so that ``--help`` does not wait for transformers.
        """


def add_number(
    parser: Options,
    option: str,
    about: str = "",
    *,
    default: float | None = None,
    metavar: str = "N",
) -> None:
    """Adds an `option` with a number as value: an integer unless its default is a ``float``."""
    kind = float if isinstance(default, float) else int
    if default is not None:
        about = f"{about} (default: {f'{default:g}' if kind is float else default})".lstrip()
    parser.add_argument(option, type=kind, default=default, metavar=metavar, help=about or None)


def add_duration(
    parser: Options,
    option: str,
    about: str = "",
    *,
    default: str | None = None,
    unit: Literal["s", "ms"] = "s",
    zero: bool = False,
) -> None:
    """Adds an `option` with a duration as value: ``500ms``, ``30s``, ``7d``, or seconds.

    The parsed value is a number of `unit`, under the name of the Python argument:
    ``--client-timeout`` sets ``client_timeout_s``.

    Args:
        parser: gets the option.
        option: its name, without a unit.
        about: its description.
        default: the default, in the form that a user writes.
        unit: the unit of the value.
        zero: true if 0 is allowed.
    """

    def parse(text: str) -> float:
        try:
            seconds = parse_duration(text, field=option, zero=zero)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return seconds if unit == "s" else 1000 * seconds

    parser.add_argument(
        option,
        dest=f"{option.removeprefix('--').replace('-', '_')}_{unit}",
        type=parse,
        default=default,
        metavar="TIME",
        help=(about if default is None else f"{about} (default: {default})").lstrip() or None,
    )


def add_old_name(
    parser: Options, old: str, new: str, kind: Callable[[str], object] | None = None
) -> None:
    """Accepts `old` for the option `new`, for scripts of earlier versions; help does not show it.

    `kind` parses its value, if that had another form.
    """
    action = copy.copy(next(one for one in parser._actions if new in one.option_strings))  # noqa: SLF001
    action.option_strings = [old]
    action.default = action.help = argparse.SUPPRESS
    action.type = kind or action.type
    parser._add_action(action)  # noqa: SLF001  argparse has no other way to add a copy


def add_json(parser: Options, per: str = "") -> None:
    """Adds ``--json``, which prints one JSON object on standard output, or one for each `per`.

    With ``--json`` an error is printed as a JSON object on standard error.
    """
    each = f" per {per}" if per else ""
    parser.add_argument("--json", action="store_true", help=f"print one JSON object{each}")


def picked(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Returns the options whose names are those of keyword arguments, by name."""
    return {name: getattr(arguments, name) for name in names}


def require_at_least_one(arguments: argparse.Namespace, *names: str) -> None:
    """Checks that the options `names` are at least 1; those without a value are accepted.

    Raises:
        ConfigurationError: one of them is below 1.
    """
    for name in names:
        number = getattr(arguments, name)
        if number is not None and number < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} {number}: must be at least 1")


def chosen(option: str, given: str, known: Iterable[str]) -> tuple[str, ...]:
    """Returns the names in the value of `option`, ``"NAME,…"``, each once.

    Raises:
        ConfigurationError: one of them is not `known`.
    """
    valid = set(known)
    names = tuple(dict.fromkeys(given.split(",")))
    for name in names:
        if name not in valid:
            raise ConfigurationError(f"{option} {name}: {nearest(name, valid)}")
    return names


def tell_unknown(blocks: int) -> None:
    """Prints on standard error that of `blocks`, which stay, the tenants are not known."""
    if blocks:
        tell(
            f"of {blocks} blocks that stay it is not known whose they are: older versions did not "
            "note it, and SGLang and vLLM's tier do not tell it"
        )


def tell(what: str) -> None:
    """Prints a line about progress on standard error."""
    print(f"kvconnect: {what}", file=sys.stderr, flush=True)


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
