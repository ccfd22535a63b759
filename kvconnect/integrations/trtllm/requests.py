"""TensorRT-LLM's requests as kvconnect's keys see them, and what is saved of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvconnect.connector.io.orders import SaveOrder
from kvconnect.connector.pair.save_plan import SavePlan
from kvconnect.digest.doubts import Doubt, note_doubt
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.core.requests import PRIORITY, RequestMaker
from kvconnect.request import LlmRequest

__all__ = ["TrackedRequest", "tracked"]

# Of a request: what changes keys and values, and is not in its tokens. None of it is told apart.
_UNTOLD = (
    *("lora_id", "lora_task_id", "lora_weights", "lora_config", "prompt_embedding_table"),
    *("multimodal_hashes", "multimodal_positions", "multimodal_lengths", "multimodal_uuids"),
    *("multimodal_embedding", "py_multimodal_data", "mrope_rotary_cos_sin"),
    *("encoder_tokens", "input_token_extra_ids", "position_ids", "prompt_adapter_id"),
)


class TrackedRequest:
    """A request while TensorRT-LLM runs it.

    Attributes:
        request: its tokens and keys.
        first: number of the first block that was fetched for its next admission.
        promised: how many were.
        reported: whether the blocks of its admission are known.
    """

    def __init__(self, request: LlmRequest) -> None:
        self.request = request
        self.first = 0
        self.promised = 0
        self.reported = False
        self._plan = SavePlan(request)

    def note_stored(self, num_blocks: int) -> None:
        """The store has so many leading blocks of it."""
        self._plan.note_stored((num_blocks,))

    def note_gone(self, block: int) -> None:
        """That block could not be had, although it was found: it is saved anew."""
        self._plan.note_missing(block)

    def note_missing(self, block: int) -> None:
        """That block could not be staged; what is behind it would not be found."""
        self._plan.note_missing(block, until_end=True)

    def restart(self) -> None:
        """Forgets its blocks, which are others' by now; the next report names all of the new ones.

        What of it is in the store stays known.
        """
        self.first = self.promised = 0
        self.reported = False
        self._plan.forget_blocks()

    def begins_with(self, tokens: npt.NDArray[np.int32]) -> bool:
        """Returns whether a whole report, `tokens`, goes on from what is known of the request."""
        known = self.request.tokens.view
        return np.array_equal(known, tokens[: len(known)])

    def extend(self, data: Any, first_id: int) -> None:
        """Takes over what `data`, a ``RequestData``, reports.

        Args:
            data: new tokens and blocks; all of them where none were reported before.
            first_id: added to block ids. A block that a window has passed has -1, and keeps it.
        """
        tokens = np.asarray(data.new_tokens, dtype=np.int32)
        # The prompt is known from its admission; the first report repeats it.
        new = tokens if self.reported else tokens[self.request.num_tokens :]
        if len(new):
            self.request.tokens.extend(new)
        self.reported = True
        ids = [first_id + one if one >= 0 else -1 for one in data.new_block_ids]
        priorities = getattr(data, "priorities", None) or [PRIORITY] * len(ids)
        self._plan.extend((ids,), list(priorities)[: len(ids)])

    def order(self, num_computed: int, num_scheduled: int) -> SaveOrder | None:
        """What a forward pass fills that computes `num_scheduled` tokens behind `num_computed`."""
        end = min(num_computed + num_scheduled, self.request.num_tokens)
        num_full = end // self.request.key_chain.tokens_per_block
        return self._plan.order(num_full, num_computed) if self._plan.is_due(num_full) else None


def tracked(request: Any, maker: RequestMaker) -> TrackedRequest | None:
    """A record of TensorRT-LLM's `request`; ``None``: it is not cached, and that is counted."""
    untold = [name for name in _UNTOLD if _is_given(getattr(request, name, None))]
    if untold:
        note_doubt(Doubt.UNKNOWN_INPUT, ", ".join(untold))
        return None
    salt = getattr(request, "cache_salt", None)
    number = getattr(request, "cache_salt_id", None)
    if salt is None and number is not None:
        salt = f"id:{number}"
    try:
        tokens = np.asarray(request.get_tokens(0), dtype=np.int32)
    except OverflowError:
        note_doubt(Doubt.BAD_TOKENS)
        return None
    try:
        made = maker.make(tokens, cache_salt=salt)
    except ConfigurationError:  # which shows the salt
        note_doubt(Doubt.BAD_SALT)
        return None
    made.request_id = request.request_id
    return TrackedRequest(made)


def _is_given(value: object) -> bool:
    return value is not None and not (hasattr(value, "__len__") and len(value) == 0)
