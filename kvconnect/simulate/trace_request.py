"""A request of a trace: small while it waits, converted to tokens once it is served."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvconnect.tokens import TokenArray

__all__ = ["HashedTokens", "TraceRequest"]


@dataclass(frozen=True, slots=True, eq=False)
class HashedTokens:
    """The tokens of a request of which only equality is known, stretch by stretch.

    Every id stands for `hash_tokens` tokens that no other id begins with: the id itself, repeated
    as pairs of int32. Tokens that no id covers are filled with `filler` in the same way.

    Attributes:
        ids: int64, at least 0.
        hash_tokens: tokens of each id; even.
        filler: below zero, of this request alone.
    """

    ids: npt.NDArray[np.int64]
    hash_tokens: int
    filler: int

    def first(self, num_tokens: int, num_covered: int) -> TokenArray:
        """Returns the first `num_tokens` tokens, int32; from `num_covered` on they are filler."""
        tokens = np.repeat(self.ids, self.hash_tokens // 2).view(np.int32)
        covered = min(num_covered, len(tokens))
        if num_tokens <= covered:
            return tokens[:num_tokens]
        filler = np.full((num_tokens - covered + 1) // 2, self.filler, np.int64).view(np.int32)
        return np.concatenate((tokens[:covered], filler[: num_tokens - covered]))


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """A line of a trace.

    Attributes:
        line: its number in the trace, from 1.
        arrival: seconds after the first request.
        input_length: prompt tokens; at least 1.
        output_length: generated tokens.
        system_length: leading prompt tokens that are a shared system prompt; ``None``: not known.
        content: the tokens of prompt and answer, or what is known of them.
        output_known: whether `content` covers the answer, too; otherwise no other request's begins
            with the same tokens.
    """

    line: int
    arrival: float
    input_length: int
    output_length: int
    system_length: int | None
    content: HashedTokens | TokenArray
    output_known: bool

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt and answer."""
        return self.input_length + self.output_length

    def tokens(self) -> TokenArray:
        """Returns prompt and answer, int32."""
        if isinstance(self.content, HashedTokens):
            covered = self.num_tokens if self.output_known else self.input_length
            return self.content.first(self.num_tokens, covered)
        return self.content[: self.num_tokens]
