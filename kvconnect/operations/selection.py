"""Selects stored blocks by age, use, model, tenant, adapter and pool group."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvconnect.backend import StoredEntry
from kvconnect.errors import ConfigurationError
from kvconnect.keys import KEY_NBYTES, Namespace, model_tag, salt_of

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

    @property
    def everything(self) -> bool:
        """Returns whether no criterion is given."""
        return self == type(self)()

    @property
    def names_something(self) -> bool:
        """Returns whether it names a model, a tenant, an adapter or a group, not an age alone."""
        return any(one is not None for one in (self.model, self.namespaces, self.groups))

    def fits(self, entry: StoredEntry) -> bool:
        """Returns whether `entry` is selected."""
        return self._fits_but_tenant(entry) and self._fits_tenant(entry.namespace)

    def cannot_tell(self, entry: StoredEntry) -> bool:
        """Returns whether `entry` may be selected: its salt is not recorded."""
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


def is_digest(text: str) -> bool:
    """Returns whether `text` may be the first digits of a model's digest."""
    return _HEX.fullmatch(text) is not None


def model_prefix(text: str | None, revision: str | None = None) -> str | None:
    """Returns the hexadecimal digits that blocks of a model begin with; ``None``: of any model.

    Args:
        text: the model's directory, whose files may be read whole, or the first digits themselves.
        revision: the name of the directory's weights, if engines use one.

    Raises:
        ConfigurationError: `text` is neither; names the command's option.
    """
    if text is not None and Path(text).is_dir():
        from kvconnect.digest import model_digest

        return model_tag(model_digest(text, revision=revision)).hex()
    if revision is not None:
        raise ConfigurationError(f"--model-revision {revision}: needs --model DIR")
    if text is None:
        return None
    if is_digest(text):
        return text.lower()
    raise ConfigurationError(
        f"--model {text}: neither a directory nor at least 4 hexadecimal digits of a digest, as "
        f"'kvconnect ls' shows them"
    )


def namespaces_of(salt: str | None, lora: str | None) -> frozenset[bytes] | None:
    """Returns the digests of the namespaces of a tenant's adapter; ``None``: of any namespace."""
    if salt is None and lora is None:
        return None
    # An adapter may have been given as a number or as text.
    numbers = [int(lora)] if lora is not None and lora.isdecimal() else []
    return frozenset(Namespace(salt, one).encode() for one in (lora, *numbers))
