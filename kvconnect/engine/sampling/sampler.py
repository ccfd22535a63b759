"""Chooses the next token from the logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from kvconnect.engine.sampling.penalties import Penalties
from kvconnect.request import LlmRequest, SamplingParams

__all__ = ["Sampler", "sampled_tokens"]


class Sampler:
    """Samples greedily or at random. Has one random generator per live request that samples.

    A request draws one number per token from its own generator: equal seeds give equal samples,
    whatever else is in the batch.

    Args:
        eos_token_ids: the model's own end-of-sequence tokens.
    """

    def __init__(self, eos_token_ids: Collection[int] = ()) -> None:
        self._generators: dict[int, torch.Generator] = {}
        self._penalties = Penalties(eos_token_ids)

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
