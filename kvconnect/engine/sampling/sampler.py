"""Chooses the next token from the logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from kvconnect.request import LlmRequest, SamplingParams
from kvconnect.tokens import TokenArray


class Sampler:
    """Samples greedily or at random. Has one random generator per live request that samples.

    A request draws one number per token from its own generator: equal seeds give equal samples,
    whatever else is in the batch.

    Args:
        eos_token_ids: the model's own end-of-sequence tokens.
    """

    def __init__(self, eos_token_ids: Collection[int] = ()) -> None:
        self._generators: dict[int, torch.Generator] = {}
        self._penalties = _Penalties(eos_token_ids)

    def sample(self, logits: Tensor, requests: Sequence[LlmRequest]) -> list[int | Exception]:
        """Returns one token for each request, or the error that prevented it.

        Args:
            logits: ``[requests, vocab]``.
            requests: the request of each row; the generators of those that sample advance.
        """
        # The choice is made in float32, for any dtype of the model; so does transformers.
        scores = logits.float()
        tokens: list[int | Exception] = list(_best(scores))
        for row, request in enumerate(requests):
            params = request.sampling_params
            if params.temperature > 0 or params.adjusts_logits:
                try:
                    tokens[row] = self._choose(scores[row], request)
                except Exception as error:  # noqa: BLE001  of this request, not of the batch
                    tokens[row] = error
        return tokens

    def forget(self, request: LlmRequest) -> None:
        """Forgets `request`, which ended."""
        self._generators.pop(request.request_id, None)
        self._penalties.forget(request)

    def _choose(self, scores: Tensor, request: LlmRequest) -> int:
        """Chooses a token from the logits ``[vocab]`` of a request that is not plainly greedy."""
        params = request.sampling_params
        if params.adjusts_logits:
            scores = self._penalties.apply(scores, request)
        if params.temperature > 0:
            return _draw(scores, params, self._generator(request))
        return int(scores.argmax())

    def _generator(self, request: LlmRequest) -> torch.Generator:
        generator = self._generators.get(request.request_id)
        if generator is None:
            generator = self._generators[request.request_id] = torch.Generator()
            seed = request.sampling_params.seed
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed % (1 << 63))
        return generator


def _best(scores: Tensor) -> list[int]:
    """Returns the first highest value's index in each row of ``[rows, vocab]``."""
    if scores.device.type != "cpu":
        best: list[int] = scores.argmax(dim=-1).tolist()
    else:  # torch's own takes 20 times as long here
        best = scores.numpy().argmax(axis=-1).tolist()
    return best


def _draw(scores: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    ranked, order = torch.sort(scores, descending=True, stable=True)
    if params.top_k:
        ranked = ranked[: min(params.top_k, len(ranked))]
    # Relative to the best one: a temperature near zero must not make infinities.
    relative = (ranked - ranked[0]).double() / params.temperature
    probabilities = torch.softmax(relative, dim=-1)
    if params.min_p:  # probabilities of the distribution that is sampled, as in vLLM
        likely = int((probabilities >= params.min_p * probabilities[0]).sum())
        probabilities = torch.softmax(relative[:likely], dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    # The nucleus is the shortest prefix that reaches top_p.
    kept = int(torch.searchsorted(cumulative, params.top_p)) + 1
    cumulative = cumulative[:kept]
    point = torch.rand((), generator=generator, dtype=torch.float64).item() * cumulative[-1].item()
    choice = min(int(torch.searchsorted(cumulative, point, right=True)), len(cumulative) - 1)
    return int(order[choice])


def sampled_tokens(chosen: Sequence[int | Exception]) -> list[int]:
    """Returns `chosen`, or raises the first error in it."""
    tokens = []
    for one in chosen:
        if isinstance(one, Exception):
            raise one
        tokens.append(one)
    return tokens


class _Penalties:
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
