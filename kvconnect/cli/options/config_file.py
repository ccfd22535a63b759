"""Reads the options of a command from a TOML file: ``kvconnect serve --config FILE``."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvconnect.errors import ConfigurationError, nearest


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds ``--config``, which `with_config` reads."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a TOML file of options by their names, as max-batch-size = 32; those of the command "
        "line win",
    )


def with_config(arguments: Sequence[str], parser: argparse.ArgumentParser) -> Sequence[str]:
    """Returns `arguments`, and the options of the file that ``--config`` names.

    Options in `arguments` replace those of the file, also options that may be repeated.

    Args:
        arguments: the arguments of the command line, the command first.
        parser: the parser of all commands; it is changed and cannot be used afterwards.

    Raises:
        ConfigurationError: the file cannot be read, or has an unknown name or a bad value.
    """
    command = _chosen(arguments, parser)
    if command is None or {"-h", "--help"} & set(arguments):
        return arguments
    actions = [one for one in command._actions if one.help != argparse.SUPPRESS]  # noqa: SLF001
    positional = {one.dest for one in actions if not one.option_strings}
    for action in command._actions:  # noqa: SLF001  argparse cannot say what was given
        action.default, action.required = argparse.SUPPRESS, False
        if action.dest in positional:
            action.nargs = "?"
    given = vars(parser.parse_known_args(list(arguments))[0])
    if "config" not in given:
        return arguments
    path = given["config"]
    before: list[str] = []
    after: list[str] = []
    for name, value in _read(path).items():
        action = _named(name, actions, path)
        if action.dest not in given:
            words = list(_words(action, value, f"{path}: {name}"))
            (before if action.dest in positional else after).extend(words)
    # A positional value must not follow an option that takes several.
    at = next(index for index, one in enumerate(arguments) if not one.startswith("-")) + 1
    return [*arguments[:at], *before, *arguments[at:], *after]


def _chosen(
    arguments: Sequence[str], parser: argparse.ArgumentParser
) -> argparse.ArgumentParser | None:
    """Returns the parser of the command, if it has ``--config``."""
    for action in parser._actions:  # noqa: SLF001
        if isinstance(action.choices, Mapping):
            name = next((one for one in arguments if not one.startswith("-")), "")
            found: argparse.ArgumentParser | None = action.choices.get(name)
            if found is not None and "--config" in found._option_string_actions:  # noqa: SLF001
                return found
    return None


_LONGEST = 1 << 20
"""The most bytes of a file."""


def _read(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise ConfigurationError(f"--config {path}: is larger than {_LONGEST} bytes")
        return tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigurationError(f"--config {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigurationError(f"--config {path}: is not TOML ({error})") from error


def _named(name: str, actions: Sequence[argparse.Action], path: str) -> argparse.Action:
    known = {
        (one.option_strings[-1].removeprefix("--") if one.option_strings else one.dest): one
        for one in actions
        if one.dest not in {"help", "config"}
    }
    if (found := known.get(name.replace("_", "-"))) is None:
        raise ConfigurationError(
            f"--config {path}: unknown option '{name}'; {nearest(name, known)}"
        )
    return found


def _words(action: argparse.Action, value: object, where: str) -> Iterator[str]:
    """Yields the words of a command line that give `action` the `value`."""
    option = action.option_strings[-1] if action.option_strings else None
    flag = option is not None and action.nargs == 0
    values = value if isinstance(value, list) else [value]
    if flag != isinstance(value, bool):
        raise ConfigurationError(f"{where}: {'true or false' if flag else 'a value'} is needed")
    if flag and option is not None:
        yield from [option] if value else []
        return
    for one in values:
        if isinstance(one, bool) or not isinstance(one, (str, int, float)):
            raise ConfigurationError(f"{where}: must be text, a number, or a list of them")
    if isinstance(value, list) and not _takes_several(action):
        raise ConfigurationError(f"{where}: one value is needed, not a list")
    if option is None:
        yield from map(str, values)
    elif action.nargs == "+":
        yield from [option, *map(str, values)] if values else []
    else:
        yield from (f"{option}={one}" for one in values)


def _takes_several(action: argparse.Action) -> bool:
    return action.nargs == "+" or isinstance(action, argparse._AppendAction)  # noqa: SLF001
