"""What a transfer is called between two engines: by its id, and by what its KV depends on."""

from __future__ import annotations

from kvconnect.keys import BlockKey
from kvconnect.request import LlmRequest

__all__ = ["prefix_key", "transfer_name"]


def transfer_name(transfer_id: str, request: LlmRequest, num_tokens: int) -> str:
    """The name of the first `num_tokens` tokens of `request`, handed out as `transfer_id`.

    A reader whose prompt, model, salt or block size differs asks for another name: what it would
    get is not what its own KV is. So the tokens need not be compared anywhere else.
    """
    return f"{transfer_id}/{num_tokens}/{prefix_key(request, num_tokens).hex()}"


def prefix_key(request: LlmRequest, num_tokens: int) -> BlockKey:
    """The chained key of the first `num_tokens` tokens of `request`: 32 bytes.

    Args:
        request: whose.
        num_tokens: 1 to as many as it has.
    """
    chain = request.key_chain
    if num_tokens % chain.tokens_per_block:
        return chain.tail(num_tokens)
    return chain.parent(num_tokens // chain.tokens_per_block)
