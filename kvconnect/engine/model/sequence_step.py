"""The computation of one sequence in a step: all that a rank needs to know of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvconnect.engine.model.attention import BlockTable
from kvconnect.request import LlmRequest, RequestState
from kvconnect.tokens import TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class SequenceStep:
    """A run of consecutive tokens of one request, and the blocks of all of its tokens.

    Attributes:
        request_id: the id of the request.
        start: the first token's position in its sequence.
        tokens: ``[n]`` int32; drafts follow the last known token.
        num_wanted: the number of last tokens whose logits are computed: one, and one for each
            draft; all tokens if log probabilities of the prompt are requested.
        is_prompt: true if the tokens are the prompt's.
        tables: block ids, by pool group.
    """

    request_id: int
    start: int
    tokens: TokenArray
    num_wanted: int
    is_prompt: bool
    tables: tuple[BlockTable, ...]

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    @property
    def num_drafts(self) -> int:
        """The drafts among the tokens. Only sequences that generate have some."""
        return 0 if self.is_prompt else len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class RequestSlice:
    """A sequence's part of the packed row: its tokens ``start..end``.

    Attributes:
        sequence: the sequence of these tokens.
        start, end: positions in its sequence.
        first_row: the first row of their queries.
        first_key: the row of their first key and value; it differs from `first_row` only if queries
            are left out.
    """

    sequence: SequenceStep
    start: int
    end: int
    first_row: int
    first_key: int

    @property
    def count(self) -> int:
        """The number of its tokens."""
        return self.end - self.start

    def divided(self, most: int) -> Iterator[RequestSlice]:
        """Yields parts of at most so many tokens, in order."""
        for offset in range(0, self.count, most):
            yield RequestSlice(
                self.sequence,
                self.start + offset,
                min(self.start + offset + most, self.end),
                self.first_row + offset,
                self.first_key + offset,
            )


def first_scheduled_token(request: LlmRequest) -> int:
    """Returns the first token of `request` to compute, after a load of this step."""
    return max(request.num_computed_tokens, request.num_external_tokens)


def remaining_tokens(request: LlmRequest) -> int:
    """Returns how many known tokens of `request` are to be computed, after a load of this step."""
    return request.num_tokens - first_scheduled_token(request)


def planned(
    requests: Sequence[LlmRequest], tables: Sequence[Mapping[int, Sequence[int]]]
) -> tuple[SequenceStep, ...]:
    """Returns the computation of `requests`, with ``num_scheduled_tokens`` and drafts set.

    Args:
        requests: in the order in which they are packed.
        tables: block ids of each request, one mapping for each pool group.
    """
    return tuple(
        _sequence(one, tuple(np.asarray(table[one.request_id], np.int64) for table in tables))
        for one in requests
    )


def sampled_rows(
    plan: Sequence[SequenceStep], requests: Sequence[LlmRequest]
) -> list[tuple[int, LlmRequest]]:
    """Returns the rows of a step's logits that tokens are chosen from, each with its request.

    Those are the rows after the last token of each sequence and after each of its drafts.
    """
    rows = []
    stop = 0
    for one, request in zip(plan, requests, strict=True):
        stop += one.num_wanted
        rows += [(row, request) for row in range(stop - 1 - len(request.draft_tokens), stop)]
    return rows


def _sequence(request: LlmRequest, tables: tuple[BlockTable, ...]) -> SequenceStep:
    start, drafts = first_scheduled_token(request), request.draft_tokens
    known = request.tokens.view[start : start + request.num_scheduled_tokens]
    whole = request.sampling_params.prompt_logprobs is not None and start < request.prompt_len - 1
    return SequenceStep(
        request.request_id,
        start,
        tokens=np.concatenate([known, drafts]) if len(drafts) else known,
        num_wanted=(len(known) if whole else 1) + len(drafts),
        is_prompt=request.state is not RequestState.GENERATION,
        tables=tables,
    )
