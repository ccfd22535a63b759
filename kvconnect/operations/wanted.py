"""The blocks that a verb applies to: those of prompts, of keys, of a tenant, or all."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvconnect.errors import ConfigurationError
from kvconnect.keys import Namespace, check_salt, salt_tag
from kvconnect.operations.selection import Selection, namespaces_of
from kvconnect.tokens import TokenArray

__all__ = ["FEWEST_DIGITS", "Wanted", "WantedPrompt", "key_digits", "tenant"]

FEWEST_DIGITS = 8
"""The fewest hexadecimal digits that may stand for a key."""

_DIGITS = re.compile(rf"[0-9a-f]{{{FEWEST_DIGITS},64}}")
_NO_TENANT = Namespace().encode()


@dataclass(frozen=True, slots=True, eq=False)
class WantedPrompt:
    """A prompt: its tokens, and the model, tenant and adapter of its blocks."""

    tokens: TokenArray
    selection: Selection


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Wanted:
    """The blocks that a verb applies to.

    Attributes:
        selection: the blocks that fit it, if there are neither `prompts` nor `keys`.
        prompts: the blocks of these prompts.
        keys: the blocks whose store keys begin with these hexadecimal digits.
        continued: true to add all blocks that continue the prompts or keys.
        ancestors: true to add the blocks before those of `keys`.
    """

    selection: Selection = field(default_factory=Selection)
    prompts: tuple[WantedPrompt, ...] = ()
    keys: tuple[str, ...] = ()
    continued: bool = False
    ancestors: bool = False


def tenant(salt: str | None, lora: str | None, model: str | None, *, named: bool) -> Selection:
    """Returns the blocks of a tenant and model.

    Args:
        salt: the salt of the tenant; ``None``: of requests without a salt.
        lora: the adapter; ``None`` is any adapter.
        model: the digits that the model begins with; ``None``: any model.
        named: whether ``None`` as salt stands for requests without one. Else it is any tenant.

    Raises:
        ConfigurationError: `salt` is empty or too long.
    """
    check_salt(salt, "salt")
    if salt is None and lora is None and not named:
        return Selection(model=model)
    return Selection(
        model=model,
        salt=salt_tag(salt) if lora is None else None,
        namespaces=namespaces_of(salt, lora) or frozenset({_NO_TENANT}),
    )


def key_digits(keys: Iterable[str]) -> tuple[str, ...]:
    """Returns `keys` in lower case.

    Raises:
        ConfigurationError: one of them is not 8 to 64 hexadecimal digits.
    """
    found = tuple(key.lower() for key in keys)
    for key in found:
        if not _DIGITS.fullmatch(key):
            raise ConfigurationError(
                f"key: '{key:.80}' is no key; give 8 to 64 hexadecimal digits, as 'kvconnect ls' "
                "shows them"
            )
    return found
