"""Selects the stored blocks of a command: ``--older-than 7d --model DIR --salt TEXT``."""

from __future__ import annotations

import argparse
import time

from kvconnect.cli.command import NothingMatched, add_duration, add_number
from kvconnect.keys import check_salt, salt_tag
from kvconnect.operations.selection import Selection, model_prefix, namespaces_of


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `selection_of` reads."""
    group = parser.add_argument_group(
        "which blocks", "A block is meant if it fits all that is given. TIME is 30m, 12h, 7d, …"
    )
    add_duration(group, "--older-than", "stored so long ago, or longer")
    add_duration(group, "--unused-for", "last used so long ago, or longer")
    group.add_argument(
        "--model", metavar="DIR", help="of this model; or the first digits of a digest"
    )
    group.add_argument(
        "--model-revision",
        metavar="NAME",
        help="what engines name the weights of --model DIR, if they do (model_revision)",
    )
    group.add_argument(
        "--salt",
        metavar="TEXT",
        help="of requests with this cache_salt, under any model, adapter and engine; of "
        "TensorRT-LLM, where it tells the number of a salt alone, id:NUMBER",
    )
    group.add_argument(
        "--lora", metavar="ID", help="of requests with this adapter (and --salt, or none)"
    )
    add_number(group, "--group", "of this pool group")


def selection_of(arguments: argparse.Namespace) -> Selection:
    """Returns the blocks that fit every option that is given.

    Raises:
        ConfigurationError: names the option and what is right.
    """
    now = time.time()
    check_salt(arguments.salt, "--salt")
    salt, lora = arguments.salt, arguments.lora
    older, unused = arguments.older_than_s, arguments.unused_for_s
    return Selection(
        created_before=None if older is None else now - older,
        used_before=None if unused is None else now - unused,
        model=model_prefix(arguments.model, arguments.model_revision),
        salt=None if salt is None or lora is not None else salt_tag(salt),
        namespaces=namespaces_of(salt, lora),
        groups=None if arguments.group is None else frozenset({arguments.group}),
    )


def require_match(selection: Selection, *, found: bool) -> None:
    """Checks that `found` is true if `selection` names a model, tenant, adapter or group.

    A selection by age alone may be empty: a store whose blocks are all young is no error.

    Raises:
        NothingMatched: the selection names one, and no block was found.
    """
    if not found and selection.names_something:
        raise NothingMatched("no block matched")
