"""The requests of TensorRT-LLM with their keys and saves, and the orders of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvconnect.connector.io.orders import SaveOrder
from kvconnect.connector.pair.save_plan import SavePlan
from kvconnect.digest.doubts import Doubt, note_doubt
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.core.requests import PRIORITY, RequestMaker
from kvconnect.request import LlmRequest

# Fields of a request that change keys and values, and that no key distinguishes.
_UNTOLD = (
    *("lora_id", "lora_task_id", "lora_weights", "lora_config", "prompt_embedding_table"),
    *("multimodal_hashes", "multimodal_positions", "multimodal_lengths", "multimodal_uuids"),
    *("multimodal_embedding", "py_multimodal_data", "mrope_rotary_cos_sin"),
    *("encoder_tokens", "input_token_extra_ids", "position_ids", "prompt_adapter_id"),
)


@dataclass(frozen=True, slots=True)
class StepOrders:
    """The loads and saves around a forward pass, which the scheduler sends to the worker.

    Picklable.

    Attributes:
        loads: run before the pass: by request, where its fetched and checked blocks go in the pool,
            in order; -1: the pool has no block for that one, which a window has passed.
        saves: run after the pass.
    """

    loads: Mapping[int, tuple[int, ...]]
    saves: tuple[SaveOrder, ...]


class TrackedRequest:
    """A request that TensorRT-LLM runs.

    Attributes:
        request: the pair's request, with tokens and keys.
        plan: its blocks that still have to reach the store.
        first: number of the first block that was fetched for its next admission.
        promised: the number of these blocks.
        reported: whether the blocks of its admission are known.
    """

    def __init__(self, request: LlmRequest) -> None:
        self.request = request
        self.first = 0
        self.promised = 0
        self.reported = False
        self.plan = SavePlan(request)

    def restart(self) -> None:
        """Forgets the blocks of the request, which are replaced; the next report names all of them.

        Its blocks in the store stay known.
        """
        self.first = self.promised = 0
        self.reported = False
        self.plan.forget_blocks()

    def begins_with(self, tokens: npt.NDArray[np.int32]) -> bool:
        """Returns whether a whole report, `tokens`, continues the known tokens of the request."""
        known = self.request.tokens.view
        return np.array_equal(known, tokens[: len(known)])

    def extend(self, data: Any, first_id: int) -> None:
        """Adds the tokens and blocks that `data`, a ``RequestData``, reports.

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
        self.plan.extend((ids,), list(priorities)[: len(ids)])

    def order(self, num_computed: int, num_scheduled: int) -> SaveOrder | None:
        """Returns the saves for a pass over `num_scheduled` tokens after `num_computed`."""
        end = min(num_computed + num_scheduled, self.request.num_tokens)
        num_full = end // self.request.key_chain.tokens_per_block
        return self.plan.order(num_full, num_computed) if self.plan.is_due(num_full) else None


def tracked(request: Any, maker: RequestMaker) -> TrackedRequest | None:
    """Returns a record of TensorRT-LLM's `request`; ``None``, which is counted, if not cached."""
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
