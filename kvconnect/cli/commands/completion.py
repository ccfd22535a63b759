"""The command ``kvconnect completion``: a script that completes commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

_SCRIPT = """\
_kvconnect() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  local command="" words="" one
  for one in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    [[ $one == -* ]] && continue
    command="${{command:+$command }}$one"
    [[ $command == bench ]] || break
  done
  case "$command $before" in
{choices}
    *)
      case "$command" in
{options}
      esac
      [[ $word == -* || " {groups} " == *" [$command] "* ]] || words="" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _kvconnect kvconnect
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``completion``."""
    parser.description = (
        "Print a script that completes commands, options and their values. In ~/.bashrc: "
        'eval "$(kvconnect completion bash)"; in ~/.zshrc, after compinit: '
        'eval "$(kvconnect completion zsh)". Files are completed where nothing else is known.'
    )
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell")


def run(arguments: argparse.Namespace) -> None:
    """Prints the script."""
    from kvconnect.cli.main import make_parser

    if arguments.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    choices, options, groups = [], [], []
    for command, parser in _commands(make_parser()):
        words: list[str] = []
        for action in parser._actions:  # noqa: SLF001  argparse has no public list
            if action.help == argparse.SUPPRESS:
                continue
            words += action.option_strings
            values = " ".join(map(str, action.choices or ()))
            if values and action.option_strings:
                names = "|".join(f'"{command} {option}"' for option in action.option_strings)
                choices.append(f'    {names}) words="{values}" ;;')
            elif values:
                words += values.split()
                groups.append(f"[{command}]")
        options.append(f'        "{command}") words="{" ".join(words)}" ;;')
    print(
        _SCRIPT.format(
            choices="\n".join(choices), options="\n".join(options), groups=" ".join(groups)
        ),
        end="",
    )


def _commands(
    parser: argparse.ArgumentParser, name: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yields every command and its parser, the program itself by an empty name."""
    yield name, parser
    for action in parser._actions:  # noqa: SLF001
        if isinstance(action.choices, Mapping):
            for more, chosen in action.choices.items():
                yield from _commands(chosen, f"{name} {more}".strip())
