"""Selects the stored blocks of a command: ``--older-than 7d --model DIR --salt TEXT``."""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import dataclass
from pathlib import Path

from kvconnect.backend import StoredEntry
from kvconnect.cli.command import NothingMatched, add_duration, add_number
from kvconnect.errors import ConfigurationError
from kvconnect.keys import KEY_NBYTES, Namespace, check_salt, model_tag, salt_of, salt_tag

__all__ = ["Selection"]

_NOBODY = Namespace().encode()
_HEX = re.compile(r"[0-9a-fA-F]{4,64}")


@dataclass(frozen=True, slots=True)
class Selection:
    """The blocks that fit every given criterion.

    Attributes:
        created_before, used_before: Unix seconds.
        model: hexadecimal digits that the block's model begins with.
        salt: tag of a tenant's salt.
        namespaces: digests of salt and adapter; without an adapter those of blocks of older
            versions, which store no salt by itself.
        groups: pool groups.
    """

    created_before: float | None = None
    used_before: float | None = None
    model: str | None = None
    salt: bytes | None = None
    namespaces: frozenset[bytes] | None = None
    groups: frozenset[int] | None = None

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Adds the options that `from_arguments` reads."""
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

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Selection:
        """Makes the selection of the options.

        Raises:
            ConfigurationError: names the option and what is right.
        """
        now = time.time()
        check_salt(arguments.salt, "--salt")
        salt, lora = arguments.salt, arguments.lora
        older, unused = arguments.older_than_s, arguments.unused_for_s
        return cls(
            created_before=None if older is None else now - older,
            used_before=None if unused is None else now - unused,
            model=_model(arguments.model, arguments.model_revision),
            salt=None if salt is None or lora is not None else salt_tag(salt),
            namespaces=_namespaces(salt, lora),
            groups=None if arguments.group is None else frozenset({arguments.group}),
        )

    @property
    def everything(self) -> bool:
        """Returns whether no criterion is given."""
        return self == Selection()

    def require_match(self, *, found: bool) -> None:
        """Checks that a block was found of the model, tenant, adapter or group that it names.

        A selection by age alone names none: a store whose blocks are all young is as it should be.

        Raises:
            NothingMatched: it names one, and none was found.
        """
        if not found and any(one is not None for one in (self.model, self.namespaces, self.groups)):
            raise NothingMatched("no block matched")

    def fits(self, entry: StoredEntry) -> bool:
        """Returns whether `entry` is selected."""
        return self._fits_but_tenant(entry) and self._fits_tenant(entry.namespace)

    def cannot_tell(self, entry: StoredEntry) -> bool:
        """Returns whether `entry` might be selected, but does not say which salt it has."""
        return (
            self.salt is not None
            and salt_of(entry.namespace) is None
            and entry.namespace != _NOBODY
            and not self._fits_tenant(entry.namespace)
            and self._fits_but_tenant(entry)
        )

    def _fits_tenant(self, namespace: bytes) -> bool:
        if self.namespaces is None:
            return True
        if self.salt is not None and (known := salt_of(namespace)) is not None:
            return known == self.salt
        return namespace[:KEY_NBYTES] in self.namespaces

    def _fits_but_tenant(self, entry: StoredEntry) -> bool:
        return (
            (self.created_before is None or entry.created_at <= self.created_before)
            and (self.used_before is None or entry.used_at <= self.used_before)
            and (self.model is None or entry.model.hex().startswith(self.model))
            and (self.groups is None or entry.group in self.groups)
        )


def _model(text: str | None, revision: str | None) -> str | None:
    if text is not None and Path(text).is_dir():
        from kvconnect.digest import model_digest

        return model_tag(model_digest(text, revision=revision)).hex()
    if revision is not None:
        raise ConfigurationError(f"--model-revision {revision}: needs --model DIR")
    if text is None:
        return None
    if _HEX.fullmatch(text):
        return text.lower()
    raise ConfigurationError(
        f"--model {text}: neither a directory nor at least 4 hexadecimal digits of a digest, as "
        f"'kvconnect ls' shows them"
    )


def _namespaces(salt: str | None, lora: str | None) -> frozenset[bytes] | None:
    if salt is None and lora is None:
        return None
    # An adapter may have been given as a number or as text.
    numbers = [int(lora)] if lora is not None and lora.isdecimal() else []
    return frozenset(Namespace(salt, one).encode() for one in (lora, *numbers))
