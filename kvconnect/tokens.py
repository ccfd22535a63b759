"""The token ids: converted once at the edge, int32 everywhere inside."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvconnect.errors import ConfigurationError

TokenArray: TypeAlias = npt.NDArray[np.int32]
Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer]

_INT32 = np.iinfo(np.int32)
_AT_ONCE = 1 << 15  # the interpreter does nothing else meanwhile


def as_token_array(tokens: Tokens, *, field: str = "tokens") -> TokenArray:
    """Returns `tokens` as a contiguous one-dimensional int32 array, without a copy if it is one.

    Raises:
        ConfigurationError: `tokens` are not one-dimensional, not integers, or outside int32.
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.ndim == 1:
        return np.ascontiguousarray(tokens)
    if isinstance(tokens, (list, tuple)) and len(tokens) > _AT_ONCE:
        starts = range(0, len(tokens), _AT_ONCE)
        return np.concatenate(
            [as_token_array(tokens[start : start + _AT_ONCE], field=field) for start in starts]
        )
    if isinstance(tokens, list) and tokens and type(tokens[0]) is int:
        # At half the cost of NumPy, whose error below says what is wrong.
        with suppress(struct.error):
            array = np.empty(len(tokens), np.int32)
            struct.pack_into(f"{len(tokens)}i", array.data, 0, *tokens)
            return array
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError, TypeError, RuntimeError) as error:  # the last: tensors
        raise ConfigurationError(f"{field}: not a flat sequence of integers ({error})") from error
    if array.ndim != 1:
        raise ConfigurationError(f"{field}: one dimension is needed, this has {array.ndim}")
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise ConfigurationError(f"{field}: integers are needed, this is a sequence {_kind(array)}")
    low, high = int(array.min()), int(array.max())
    if low < _INT32.min or high > _INT32.max:
        bad = low if low < _INT32.min else high
        raise ConfigurationError(f"{field}: token id {bad} is outside int32; give 0 to 2147483647")
    return array.astype(np.int32)


def _kind(array: npt.NDArray[Any]) -> str:
    if array.dtype.kind != "O":
        return f"of {array.dtype}"
    wrong = [one for one in array if not isinstance(one, int)]
    return f"with {wrong[0]!r} in it" if wrong else "with values outside int64"


def common_length(left: TokenArray, right: TokenArray) -> int:
    """Returns how many leading tokens both have in common."""
    count = min(len(left), len(right))
    differs = left[:count] != right[:count]
    return int(differs.argmax()) if differs.any() else count


class LateTokens:
    """The tokens of a prompt that the first reader converts, on its own thread.

    Several threads may share them; should two read at once, both convert.

    Args:
        tokens: not to be changed.

    Attributes:
        array: the converted tokens; ``None``: not read yet.

    Raises:
        ConfigurationError: raised by every read if `as_token_array` refuses the tokens.
    """

    __slots__ = ("_tokens", "array")

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self.array: TokenArray | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, part: slice) -> TokenArray:
        array = self.array
        if array is None:
            array = self.array = as_token_array(self._tokens)
        return array[part]


class TokenBuffer:
    """A growing int32 array: the tokens of one sequence, prompt first, then what was generated.

    `view` is valid until the next `extend`. Not thread-safe.
    """

    __slots__ = ("_array", "_length", "_owned")

    def __init__(self, tokens: TokenArray | LateTokens) -> None:
        self._array = tokens
        self._length = len(tokens)
        self._owned = False  # the array given here is the caller's: never written to

    def __len__(self) -> int:
        return self._length

    @property
    def view(self) -> TokenArray:
        """The tokens, as a view that is not to be written to."""
        return self._array[: self._length]

    def extend(self, tokens: TokenArray) -> None:
        """Appends `tokens`; amortised constant time per token."""
        end = self._length + len(tokens)
        array = self._array
        if isinstance(array, LateTokens) or not self._owned or end > len(array):
            grown = np.empty(max(end, 2 * self._length, 64), np.int32)
            grown[: self._length] = self.view
            self._array = array = grown
            self._owned = True
        array[self._length : end] = tokens
        self._length = end

    def truncate(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens`."""
        if not 0 <= num_tokens <= self._length:
            raise ConfigurationError(f"num_tokens: {num_tokens} is outside 0..{self._length}")
        self._length = num_tokens

    def snapshot(self, num_tokens: int | None = None) -> TokenBuffer:
        """Returns a copy of the first tokens, or of all, for another thread to read."""
        if self._owned:
            return TokenBuffer(self.view[:num_tokens].copy())
        taken = TokenBuffer(self._array)
        taken._length = self._length if num_tokens is None else min(num_tokens, self._length)
        return taken

    def starts_as(self, other: TokenBuffer, num_tokens: int) -> bool:
        """Returns whether the first `num_tokens` equal those of `other`; both have that many."""
        if self._array is other._array:
            return True
        # Compared as bytes, at a fifth of the cost of NumPy's comparison.
        return self.view[:num_tokens].tobytes() == other.view[:num_tokens].tobytes()
