"""What stands for a model in the keys of a store."""

from __future__ import annotations

import hashlib

from kvconnect.backends.registry import codecs_of
from kvconnect.config import KvCacheConnectorConfig

__all__ = ["stored_as"]


def stored_as(model_digest: bytes, config: KvCacheConnectorConfig | None) -> bytes:
    """`model_digest`, or another one where blocks come back from the store rounded, or encrypted.

    So engines with another codec or another encryption key do not find these blocks at all, rather
    than find and refuse them. Lossless compression makes no difference.

    Raises:
        ConfigurationError, MissingExtra: the codec, or its key file, cannot be used.
    """
    if config is None:
        return model_digest
    codecs = codecs_of(config.backend or config.url, codec=config.codec, key_file=config.key_file)
    if not codecs.identity:
        return model_digest
    state = hashlib.blake2b(codecs.identity, digest_size=32, person=b"kvc-codecs")
    state.update(model_digest)
    return state.digest()
