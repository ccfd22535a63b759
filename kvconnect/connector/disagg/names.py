"""The name of a transfer between two engines: its id, and a digest of what decides its KV."""

from __future__ import annotations

import hashlib
import struct

from kvconnect.request import LlmRequest


def transfer_name(
    transfer_id: str, request: LlmRequest, num_tokens: int, model_digest: bytes
) -> str:
    """Returns the name of the first `num_tokens` tokens of `request`, published as `transfer_id`.

    A reader with another prompt, model or salt computes another name, so the tokens need no other
    comparison. tokens_per_block and the number of ranks are no part of the name, because readers
    convert blocks to their own shape.
    """
    digest = hashlib.blake2b(request.namespace.encode(), digest_size=32, person=b"kvc-transfer")
    digest.update(struct.pack("<q", len(model_digest)) + model_digest)
    digest.update(request.tokens.view[:num_tokens].tobytes())
    return f"{transfer_id}/{num_tokens}/{digest.hexdigest()}"


def transfer_id_of(name: str) -> str:
    """Returns the id in a name that `transfer_name` made."""
    return name.rsplit("/", 2)[0]
