"""How the next token is chosen from the logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvconnect.request import LlmRequest, SamplingParams

__all__ = ["Sampler"]


class Sampler:
    """Greedy and random sampling. Holds one random generator per live request that samples.

    A request draws one number per token from its own generator: equal seeds give equal samples,
    whatever else is in the batch.
    """

    def __init__(self) -> None:
        self._generators: dict[int, torch.Generator] = {}

    def sample(self, logits: Tensor, requests: Sequence[LlmRequest]) -> list[int]:
        """One token for each request.

        Args:
            logits: ``[requests, vocab]``.
            requests: whose; the generators of those that sample advance.
        """
        # As in transformers: the choice is made in float32, whatever the model computes in.
        scores = logits.float()
        tokens: list[int] = scores.argmax(dim=-1).tolist()
        for row, request in enumerate(requests):
            params = request.sampling_params
            if params.temperature > 0:
                tokens[row] = _draw(scores[row], params, self._generator(request))
        return tokens

    def forget(self, request: LlmRequest) -> None:
        """`request` is over."""
        self._generators.pop(request.request_id, None)

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


def _draw(scores: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    ranked, order = torch.sort(scores, descending=True, stable=True)
    if params.top_k:
        ranked = ranked[: params.top_k]
    # Relative to the best one: a temperature near zero must not make infinities.
    relative = (ranked - ranked[0]).double() / params.temperature
    probabilities = torch.softmax(relative, dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    # The nucleus is the shortest prefix that reaches top_p.
    kept = int(torch.searchsorted(cumulative, params.top_p)) + 1
    cumulative = cumulative[:kept]
    point = torch.rand((), generator=generator, dtype=torch.float64).item() * cumulative[-1].item()
    choice = min(int(torch.searchsorted(cumulative, point, right=True)), len(cumulative) - 1)
    return int(order[choice])
