"""The digest under which a store keeps blocks, by model, engine and codec; checks of settings."""

from __future__ import annotations

import hashlib

from kvconnect.backends.registry import codecs_of, open_backend
from kvconnect.config import KvCacheConnectorConfig


def stored_as(
    model_digest: bytes, config: KvCacheConnectorConfig | None, *, engine: str | None = None
) -> bytes:
    """Returns the digest that replaces `model_digest` in the keys of blocks.

    A codec that rounds or encrypts blocks gives another digest. So engines with another codec or
    encryption key do not find these blocks, instead of finding and refusing them. Lossless
    compression does not change the digest. Each namespace has its own digest, too.

    Args:
        model_digest: 32 bytes.
        config: ``None``: there is no store.
        engine: the kind of engine, whose namespace it is unless `config` names another; ``None``:
            kvconnect's own.

    Raises:
        ConfigurationError, MissingExtra: the codec, or its key file, cannot be used.
    """
    if config is None:
        return model_digest
    namespace = config.namespace or engine
    if namespace is not None:
        state = hashlib.blake2b(model_digest, digest_size=32, person=b"kvc-engines")
        state.update(namespace.encode())
        model_digest = state.digest()
    codecs = codecs_of(config.backend or config.url, codec=config.codec, key_file=config.key_file)
    if not codecs.identity:
        return model_digest
    state = hashlib.blake2b(codecs.identity, digest_size=32, person=b"kvc-codecs")
    state.update(model_digest)
    return state.digest()


def check_store(config: KvCacheConnectorConfig) -> None:
    """Checks scheme, parameters and codec of the store of `config` without opening the store.

    Raises:
        ConfigurationError: one of them is wrong.
    """
    if config.url is not None:
        open_backend(config.url, codec=config.codec, key_file=config.key_file)
