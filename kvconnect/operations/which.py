"""The blocks that a caller of `PromptStore` names, checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from kvconnect.errors import ConfigurationError
from kvconnect.keys import Namespace, check_salt, salt_tag
from kvconnect.operations.selection import Selection, namespaces_of
from kvconnect.tokens import TokenArray

if TYPE_CHECKING:
    from kvconnect.engine.request.chat import Conversation
    from kvconnect.engine.request.prompts import Prompt

FEWEST_DIGITS = 8
"""The fewest hexadecimal digits that may stand for a key."""
_DIGITS = re.compile(rf"[0-9a-f]{{{FEWEST_DIGITS},64}}")
_NO_TENANT = Namespace().encode()


class Which(TypedDict, total=False):
    """The arguments that choose the blocks of a verb of `PromptStore`.

    | name | meaning | default |
    |---|---|---|
    | ``prompts`` | the blocks of a prompt or several: text, token ids, or dicts as in `LLM` | |
    | ``messages`` | the blocks of a conversation or several, by the model's chat template | |
    | ``keys`` | the blocks whose store keys begin so, as ``kvconnect ls`` shows them | |
    | ``salt`` | of this tenant; a list has one for each of ``prompts`` | of a prompt: no salt |
    | ``lora`` | of this adapter | any; of a prompt: none |
    | ``everything`` | all blocks, of the model if there is one | ``False`` |
    """

    prompts: Prompt | Sequence[Prompt]
    messages: Conversation | Sequence[Conversation]
    keys: Sequence[str]
    salt: str | Sequence[str | None] | None
    lora: str | None
    everything: bool


def check_names(which: Which) -> None:
    """Checks that `which` has only the fields of `Which`.

    Raises:
        ConfigurationError: `which` has another field.
    """
    known = Which.__annotations__
    if wrong := [name for name in which if name not in known]:
        raise ConfigurationError(f"{wrong[0]}: unknown; give some of {', '.join(known)}")


def wanted_blocks(
    which: Which,
    prompts: Sequence[TokenArray],
    model: str | None,
    *,
    continued: bool,
    ancestors: bool,
) -> Wanted:
    """Returns the choice of blocks that `which` makes.

    Args:
        which: arguments whose names are checked.
        prompts: the tokens of its prompts and messages.
        model: the digits that the model begins with; ``None``: any model.
        continued: also all blocks that continue the prompts or keys.
        ancestors: also the blocks before those of keys.

    Raises:
        ConfigurationError: `which` is empty, or names blocks in two ways.
    """
    salt, lora = which.get("salt"), which.get("lora")
    keys = key_digits(which.get("keys", ()))
    named = [name for name in ("prompts", "messages", "keys") if name in which]
    if named and not (prompts or keys):
        # Otherwise the salt alone would choose all blocks of its tenant.
        raise ConfigurationError(f"{named[0]}: is empty; leave it out, or give some")
    if which.get("everything") and (prompts or keys or salt is not None or lora is not None):
        raise ConfigurationError("everything: give nothing else with it")
    if prompts:
        if keys:
            raise ConfigurationError("keys: give prompts or keys, not both")
        return Wanted(prompts=tuple(_each(prompts, salt, lora, model)), continued=continued)
    if keys and (salt is not None or lora is not None):
        raise ConfigurationError("keys: give neither a salt nor an adapter with them")
    if keys:
        return Wanted(keys=keys, continued=continued, ancestors=ancestors)
    if salt is not None and not isinstance(salt, str):
        raise ConfigurationError("salt: a list has one for each prompt; there are no prompts")
    if salt is None and lora is None and not which.get("everything"):
        raise ConfigurationError(
            "nothing says which blocks; give prompts, messages, keys, a salt, an adapter "
            "(lora), or everything=True"
        )
    return Wanted(selection=tenant(salt, lora, model, named=False))


def prompts_to_warm(which: Which, prompts: Sequence[TokenArray]) -> list[WarmPrompt]:
    """Returns `prompts`, the tokens of those of `which`, with their salts and the adapter.

    Raises:
        ConfigurationError: there are none, `which` gives something else, or a salt is wrong.
    """
    from kvconnect.engine.request.prompts import one_each

    others = which.get("keys") or which.get("everything")
    if not prompts or others:
        raise ConfigurationError("warm: give prompts or messages, and nothing else")
    salts: list[str | None] = one_each("salt", which.get("salt"), len(prompts))
    for salt in salts:
        check_salt(salt, "salt")
    lora = which.get("lora")
    return [WarmPrompt(one, salt, lora) for one, salt in zip(prompts, salts, strict=True)]


def _each(
    prompts: Sequence[TokenArray],
    salt: str | Sequence[str | None] | None,
    lora: str | None,
    model: str | None,
) -> Iterable[WantedPrompt]:
    from kvconnect.engine.request.prompts import one_each

    salts: list[str | None] = one_each("salt", salt, len(prompts))
    for tokens, one in zip(prompts, salts, strict=True):
        yield WantedPrompt(tokens, tenant(one, lora, model, named=True))


@dataclass(frozen=True, slots=True, eq=False)
class WarmPrompt:
    """A prompt to compute: its tokens, and the tenant and adapter of its blocks."""

    tokens: TokenArray
    salt: str | None = None
    lora: str | None = None


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
