"""The blocks that a caller of `PromptStore` names, checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypedDict

from kvconnect.errors import ConfigurationError
from kvconnect.keys import check_salt
from kvconnect.operations.wanted import Wanted, WantedPrompt, key_digits, tenant
from kvconnect.tokens import TokenArray

if TYPE_CHECKING:
    from kvconnect.engine.request.chat import Conversation
    from kvconnect.engine.request.prompts import Prompt
    from kvconnect.operations.warm import WarmPrompt

__all__ = ["Which", "check_names", "prompts_to_warm", "wanted_blocks"]


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
    from kvconnect.operations.warm import WarmPrompt

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
