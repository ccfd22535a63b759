"""The name of a transfer between two engines: its id, and a digest of what its KV depends on."""

from __future__ import annotations

import hashlib
import struct

from kvconnect.request import LlmRequest

__all__ = ["transfer_id_of", "transfer_name"]


def transfer_name(
    transfer_id: str, request: LlmRequest, num_tokens: int, model_digest: bytes
) -> str:
    """Returns the name of the first `num_tokens` tokens of `request`, published as `transfer_id`.

    A reader whose prompt, model or salt differs asks for another name, as its KV would differ. So
    the tokens are compared nowhere else. Neither tokens_per_block nor the number of ranks is part
    of the name, as readers convert blocks to their own shape.
    """
    digest = hashlib.blake2b(request.namespace.encode(), digest_size=32, person=b"kvc-transfer")
    digest.update(struct.pack("<q", len(model_digest)) + model_digest)
    digest.update(request.tokens.view[:num_tokens].tobytes())
    return f"{transfer_id}/{num_tokens}/{digest.hexdigest()}"


def transfer_id_of(name: str) -> str:
    """Returns the id in a name that `transfer_name` made."""
    return name.rsplit("/", 2)[0]
