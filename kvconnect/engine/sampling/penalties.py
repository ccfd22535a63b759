"""Changes the logits of the next token according to the tokens so far."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from kvconnect.request import LlmRequest
from kvconnect.tokens import TokenArray

__all__ = ["Penalties"]


class Penalties:
    """Applies ``min_tokens`` and the penalties of `SamplingParams`; keeps a mask of each prompt.

    Args:
        eos_token_ids: the model's own end-of-sequence tokens.
    """

    def __init__(self, eos_token_ids: Collection[int] = ()) -> None:
        self._eos_token_ids = eos_token_ids
        self._in_prompt: dict[int, Tensor] = {}  # by request id: bool, [vocab]

    def apply(self, scores: Tensor, request: LlmRequest) -> Tensor:
        """Returns the logits that the next token of `request` is chosen from.

        Args:
            scores: ``[vocab]`` float32, the model's logits; not changed.
            request: the request, without drafts.
        """
        params = request.sampling_params
        adjusted = scores.clone()
        if request.num_generated_tokens < params.min_tokens:
            ends = {*self._eos_token_ids, *params.stop_token_ids}
            known = [token for token in ends if 0 <= token < len(scores)]
            adjusted[known] = -torch.inf
        counts = _counts(request.tokens.view[request.prompt_len :], scores)
        if params.repetition_penalty != 1:
            seen = self._prompt_of(request, scores) | (counts > 0)
            divided, multiplied = (
                adjusted / params.repetition_penalty,
                adjusted * params.repetition_penalty,
            )
            adjusted = torch.where(seen, torch.where(adjusted > 0, divided, multiplied), adjusted)
        adjusted -= params.frequency_penalty * counts
        adjusted -= params.presence_penalty * (counts > 0)
        return adjusted

    def forget(self, request: LlmRequest) -> None:
        """Forgets `request`, which ended."""
        self._in_prompt.pop(request.request_id, None)

    def _prompt_of(self, request: LlmRequest, scores: Tensor) -> Tensor:
        mask = self._in_prompt.get(request.request_id)
        if mask is None:
            mask = _counts(request.tokens.view[: request.prompt_len], scores) > 0
            self._in_prompt[request.request_id] = mask
        return mask


def _counts(tokens: TokenArray, scores: Tensor) -> Tensor:
    """Returns how often each token of the vocabulary is in `tokens`: int64, ``[vocab]``."""
    # A copy: torch does not take arrays that are not to be written to.
    ids = torch.tensor(tokens, dtype=torch.int64, device=scores.device)
    return torch.bincount(ids, minlength=len(scores))
