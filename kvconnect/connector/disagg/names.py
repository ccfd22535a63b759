"""What a transfer is called between two engines: by its id, and by what its KV depends on."""

from __future__ import annotations

import hashlib
import struct

from kvconnect.request import LlmRequest

__all__ = ["transfer_id_of", "transfer_name"]


def transfer_name(
    transfer_id: str, request: LlmRequest, num_tokens: int, model_digest: bytes
) -> str:
    """The name of the first `num_tokens` tokens of `request`, handed out as `transfer_id`.

    A reader whose prompt, model or salt differs asks for another name: what it would get is not
    what its own KV is. So the tokens need not be compared anywhere else. Neither tokens_per_block
    nor the number of ranks is part of it, as blocks are read into those of another shape.
    """
    digest = hashlib.blake2b(request.namespace.encode(), digest_size=32, person=b"kvc-transfer")
    digest.update(struct.pack("<q", len(model_digest)) + model_digest)
    digest.update(request.tokens.view[:num_tokens].tobytes())
    return f"{transfer_id}/{num_tokens}/{digest.hexdigest()}"


def transfer_id_of(name: str) -> str:
    """Returns the id in a name that `transfer_name` made."""
    return name.rsplit("/", 2)[0]
