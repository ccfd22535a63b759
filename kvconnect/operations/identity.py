"""The identity of the blocks that a request would use, and of those that other engines saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.io.identity import stored_as
from kvconnect.explain import outcome
from kvconnect.keys import Namespace, check_salt, salt_tag
from kvconnect.operations.explain import Identity, StoredPrompt
from kvconnect.operations.selection import namespaces_of
from kvconnect.tokens import TokenArray

if TYPE_CHECKING:
    from kvconnect.engine.request.tokenizer import Tokenizer

__all__ = ["identity_of", "with_texts"]

_ENGINES = ("vllm", "sglang", "trtllm", "transformers")
_DIGITS = 32  # the half of a model's tag that stands for its weights


def identity_of(
    url: str,
    model: str,
    directory: tuple[Path, str | None] | None,
    *,
    salt: str | None,
    lora: str | None,
    tokens_per_block: int | None,
) -> Identity:
    """Returns the identity of requests to kvconnect's own engine with this store.

    Args:
        url: the URL of the store; its codec is a part of the identity.
        model: the digits that the model's tag begins with.
        directory: the model's directory and the name of its weights; ``None``: only `model` is
            known.
        salt: the salt of the requests; ``None``: they have none.
        lora: their adapter; ``None``: they have none.
        tokens_per_block: the tokens per block of the engine; ``None``: any.

    Raises:
        ConfigurationError: `salt` is empty or too long; the codec cannot be used.
    """
    check_salt(salt, "salt")
    models, engines = [model], {}
    if directory is not None:
        from kvconnect.digest import model_digest

        digest = model_digest(directory[0], revision=directory[1])
        config = KvCacheConnectorConfig(url=url)
        models = [stored_as(digest, config).hex()[:_DIGITS]]
        engines = {
            name: stored_as(digest, config, engine=name).hex()[:_DIGITS] for name in _ENGINES
        }
    return Identity(
        tuple(models),
        engines,
        salt_tag(salt),
        namespaces_of(salt, lora) or frozenset({Namespace().encode()}),
        tokens_per_block,
    )


def with_texts(
    found: StoredPrompt, tokens: TokenArray, tokenizer: Tokenizer | None
) -> StoredPrompt:
    """Returns `found` with the texts around the token where prompt and stored blocks differ."""
    if found.divergence is None or tokenizer is None:
        return found
    texts = outcome.with_texts(found.divergence, tokens.tolist(), tokenizer.decode)
    return replace(found, divergence=texts)
