"""The log probabilities of tokens: of the chosen one, and of the likeliest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvconnect.engine.request.tokenizer import Tokenizer

_ROWS_AT_ONCE = 64
"""Rows of logits that are turned into log probabilities together, each as long as the vocabulary"""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of one token.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 is the likeliest.
        decoded_token: its text alone; ``None`` without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


_Number = TypeVar("_Number", np.int32, np.float32)

TokenLogprobs: TypeAlias = Mapping[int, Logprob]
"""By token id: the chosen token first, then the likeliest in order."""


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The chosen and the likeliest tokens of several rows of logits.

    Attributes:
        token_ids: ``[rows, 1 + count]`` int32: the chosen token, then the likeliest ones in order.
        logprobs: the log probabilities of each, float32.
        ranks: ``[rows]`` int32, of the chosen tokens, from 1.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, rows: slice) -> TopTokens:
        return TopTokens(self.token_ids[rows], self.logprobs[rows], self.ranks[rows])

    def grown(self, size: int) -> TopTokens:
        """Returns a copy with `size` rows; those behind the present ones are not initialised."""

        def copied(rows: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
            found = np.empty((size, *rows.shape[1:]), rows.dtype)
            found[: len(rows)] = rows
            return found

        return TopTokens(copied(self.token_ids), copied(self.logprobs), copied(self.ranks))


def top_tokens(logits: Tensor, tokens: Sequence[int], count: int) -> TopTokens:
    """Returns the `count` likeliest tokens of each row, besides the chosen ones.

    Args:
        logits: ``[rows, vocab]`` as the model gave them; rows beyond those of `tokens` are left
            out.
        tokens: chosen from each row; at least one.
        count: the number of the likeliest; -1: all.
    """
    parts = [
        _top(logits[start : start + _ROWS_AT_ONCE], tokens[start : start + _ROWS_AT_ONCE], count)
        for start in range(0, len(tokens), _ROWS_AT_ONCE)
    ]
    if len(parts) == 1:
        return parts[0]
    return TopTokens(
        np.concatenate([one.token_ids for one in parts]),
        np.concatenate([one.logprobs for one in parts]),
        np.concatenate([one.ranks for one in parts]),
    )


def _top(logits: Tensor, tokens: Sequence[int], count: int) -> TopTokens:
    logprobs = torch.log_softmax(logits[: len(tokens)].float(), dim=-1)
    vocab = logprobs.shape[1]
    best = torch.topk(logprobs, vocab if count == -1 else min(count, vocab))
    chosen = torch.tensor(tokens, dtype=torch.int64, device=logprobs.device)[:, None]
    own = logprobs.gather(1, chosen)
    return TopTokens(
        torch.cat([chosen, best.indices], dim=1).to(torch.int32).cpu().numpy(),
        torch.cat([own, best.values], dim=1).cpu().numpy(),
        ((logprobs > own).sum(dim=1) + 1).to(torch.int32).cpu().numpy(),
    )


class LogprobTable:
    """The log probabilities of a text that grows, in 8 bytes for each of them.

    One thread appends. A view that was taken before stays as it is, and may be read on any thread.

    Args:
        tokenizer: for the texts; ``None``: there are none.
    """

    __slots__ = ("_count", "_rows", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._rows: TopTokens | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, found: TopTokens) -> None:
        """Adds the rows of `found`, which has as many tokens in each row as those before."""
        count = self._count + len(found)
        rows = found[:0] if self._rows is None else self._rows
        if count > len(rows):
            rows = self._rows = rows.grown(max(count, 2 * self._count))
        where = slice(self._count, count)
        rows.token_ids[where] = found.token_ids
        rows.logprobs[where] = found.logprobs
        rows.ranks[where] = found.ranks
        self._count = count

    def view(self, first: int = 0) -> LogprobView:
        """Returns the rows from `first` on, as they are now."""
        rows = None if self._rows is None else self._rows[first : self._count]
        return LogprobView(rows, self._tokenizer)


class LogprobView(Sequence[TokenLogprobs]):
    """The log probabilities of consecutive tokens; each token's mapping is made when it is read."""

    __slots__ = ("_rows", "_tokenizer")

    def __init__(self, rows: TopTokens | None, tokenizer: Tokenizer | None) -> None:
        self._rows = rows
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return 0 if self._rows is None else len(self._rows)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> LogprobView: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | LogprobView:
        if isinstance(index, slice):
            return LogprobView(None if self._rows is None else self._rows[index], self._tokenizer)
        if self._rows is None:
            raise IndexError(index)
        ids: list[int] = self._rows.token_ids[index].tolist()
        logprobs: list[float] = self._rows.logprobs[index].tolist()
        ranks = (int(self._rows.ranks[index]), *range(1, len(ids)))
        tokenizer = self._tokenizer
        return {
            token: Logprob(logprob, rank, None if tokenizer is None else tokenizer.text_of(token))
            for token, logprob, rank in zip(ids, logprobs, ranks, strict=True)
        }

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (LogprobView, list, tuple)):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<log probabilities of {len(self)} tokens>"


class PromptLogprobs(Sequence[TokenLogprobs | None]):
    """The log probabilities of the tokens of a prompt; the first one has none: nothing precedes it.

    Args:
        rest: the values of the tokens from the second one on.
    """

    __slots__ = ("_rest",)

    def __init__(self, rest: LogprobView) -> None:
        self._rest = rest

    def __len__(self) -> int:
        return 1 + len(self._rest)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs | None]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs | None] | None:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return None if place == 0 else self._rest[place - 1]

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        yield None
        yield from self._rest

    def __repr__(self) -> str:
        return f"<log probabilities of a prompt of {len(self)} tokens>"
