"""Proposes drafts: tokens that a request will probably generate next, found in its tokens so far.

A forward pass verifies all drafts at once: it keeps those that the model would have chosen, and
yields one more token. The output is that of plain greedy decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Literal, Self, TypeAlias

import numpy as np
from pydantic import Field, model_validator

from kvconnect.errors import ConfigurationError
from kvconnect.request import LlmRequest
from kvconnect.settings import Settings
from kvconnect.tokens import TokenArray

NO_DRAFTS: TokenArray = np.empty(0, np.int32)


class NgramSpeculation(Settings):
    """The settings of prompt lookup, which expects the last tokens to continue as they did before.

    Only greedy requests are drafted for; with a temperature above 0, a penalty or ``min_tokens`` a
    request runs without drafts.

    Attributes:
        num_draft_tokens: the most tokens proposed per step.
        max_ngram_size: the longest run of last tokens that is searched.
        min_ngram_size: the shortest run; longer ones are searched first.
    """

    num_draft_tokens: Annotated[int, Field(ge=1)] = 5
    max_ngram_size: Annotated[int, Field(ge=1)] = 4
    min_ngram_size: Annotated[int, Field(ge=1)] = 2

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_ngram_size > self.max_ngram_size:
            raise ValueError(
                f"min_ngram_size={self.min_ngram_size} must not exceed "
                f"max_ngram_size={self.max_ngram_size}"
            )
        return self

    @classmethod
    def of(cls, speculative: Speculation | None) -> NgramSpeculation | None:
        """Returns the settings of an object, a dict, or the name ``ngram`` (the defaults).

        Raises:
            ConfigurationError: another name.
        """
        if speculative is None or isinstance(speculative, NgramSpeculation):
            return speculative
        if isinstance(speculative, Mapping):
            return cls.given("speculative", speculative)
        if speculative != "ngram":
            raise ConfigurationError(
                f"speculative: {speculative!r} is unknown; give 'ngram' or an NgramSpeculation"
            )
        return cls()


Speculation: TypeAlias = NgramSpeculation | Mapping[str, object] | Literal["ngram"]
"""The values of an engine's ``speculative``."""


class NgramDrafter:
    """Proposes drafts; holds nothing of any request."""

    def __init__(self, settings: NgramSpeculation) -> None:
        self._settings = settings

    def propose(self, tokens: TokenArray, limit: int) -> TokenArray:
        """Returns likely successors of `tokens`: at most `limit` drafts, perhaps none.

        The drafts follow the latest earlier occurrence of the longest run of last tokens that
        occurred before. The cost is one pass over `tokens` at memory speed.
        """
        settings = self._settings
        count = min(settings.num_draft_tokens, limit)
        if count < 1:
            return NO_DRAFTS
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where a run like the last one may end
        size, found = 1, ends
        while len(ends) and size < settings.max_ngram_size:
            ends = ends[ends >= size]
            ends = ends[tokens[ends - size] == tokens[-1 - size]] if len(ends) else ends
            if len(ends):
                size, found = size + 1, ends
        if not len(found) or size < settings.min_ngram_size:
            return NO_DRAFTS
        return np.resize(tokens[found[-1] + 1 :], count)


def set_drafts(
    drafter: NgramDrafter,
    requests: Iterable[LlmRequest],
    spare: int,
    next_state_end: Callable[[LlmRequest, int], int | None],
) -> None:
    """Sets the drafts of plain greedy `requests`, within ``max_tokens``; the others have none.

    Args:
        drafter: proposes them.
        requests: the requests that generate in the next step.
        spare: the tokens of the step's budget that are left for drafts.
        next_state_end: the cache manager's method, which returns where the next snapshot of
            recurrent states is due. Drafts end before, so that no snapshot contains one.
    """
    for request in requests:
        request.draft_tokens = NO_DRAFTS
        params = request.sampling_params
        if params.temperature > 0 or params.adjusts_logits:
            continue
        # One token comes with every step anyway.
        useful = params.max_tokens - request.num_generated_tokens - 1
        if (due := next_state_end(request, request.num_computed_tokens)) is not None:
            useful = min(useful, due - request.num_tokens - 1)
        request.draft_tokens = drafter.propose(request.tokens.view, min(spare, useful))
        spare -= len(request.draft_tokens)


def accepted_run(drafts: TokenArray, chosen: Sequence[int]) -> list[int]:
    """Returns the result of a verified step: the right drafts, and the token after them.

    Args:
        drafts: the tokens that were computed after the request's last one.
        chosen: the model's choice after that one and after each draft, one more than `drafts`.
    """
    run = [chosen[0]]
    for draft, following in zip(drafts.tolist(), chosen[1:], strict=True):
        if draft != run[-1]:
            break
        run.append(following)
    return run
