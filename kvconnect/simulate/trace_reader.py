"""Reads traces: JSON lines, one request each, in the format of the published Mooncake traces.

``{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}``:
milliseconds, tokens, and one id per `hash_tokens` (512) tokens of the prompt, of which the last
stretch may be shorter. Equal ids are equal tokens. Our own additions, which others ignore:

* ``output_hash_ids`` continue ``hash_ids`` over the answer. Without them no other request begins
  with this one's answer, as the published traces cannot express that.
* ``system_length``: how many leading tokens are a system prompt that others share.
* ``tokens`` and ``output_tokens`` (or ``output_length``) instead of lengths and ids.

Other fields are ignored.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never, Self

import numpy as np
import numpy.typing as npt

from kvconnect.errors import ConfigurationError
from kvconnect.tokens import TokenArray, as_token_array

DEFAULT_HASH_TOKENS = 512
"""Tokens per hash id in the published traces."""

_LONGEST_LINE = 1 << 26
_MOST_TOKENS = 1 << 31
_LATEST_MS = 1e18


class TraceReader:
    """Iterates over the requests of a trace, one line in memory at a time. A context manager.

    Args:
        path: the path of the trace; ``-`` is standard input, and ``.gz`` is unpacked on the way.
        hash_tokens: tokens that one hash id stands for.

    Raises:
        ConfigurationError: `hash_tokens` is odd or below 2. Iterating: a bad line; names its
            number, the field, the value and what is right.
        OSError: the file cannot be read.
    """

    def __init__(self, path: str, *, hash_tokens: int = DEFAULT_HASH_TOKENS) -> None:
        if hash_tokens < 2 or hash_tokens % 2:
            raise ConfigurationError(f"hash tokens: {hash_tokens} must be even and at least 2")
        self.name = "standard input" if path == "-" else path
        self._hash_tokens = hash_tokens
        self._line = 0
        self._start_ms: float | None = None
        self._last_ms = -math.inf
        self.num_bytes: int | None = None
        self._file: io.BufferedIOBase | gzip.GzipFile = sys.stdin.buffer  # type: ignore[assignment]
        self._raw: io.BufferedIOBase | None = None
        if path != "-":
            try:
                self._raw = Path(path).open("rb")  # noqa: SIM115
            except OSError as error:
                raise ConfigurationError(f"trace '{path}': {error.strerror}") from error
            self.num_bytes = Path(path).stat().st_size
            packed = path.endswith(".gz")
            self._file = gzip.GzipFile(fileobj=self._raw) if packed else self._raw

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._raw is not None:
            self._raw.close()

    @property
    def bytes_read(self) -> int:
        """The position in the file, of `num_bytes`; those are ``None`` for standard input."""
        return 0 if self._raw is None or self._raw.closed else self._raw.tell()

    @property
    def last_arrival(self) -> float:
        """The seconds from the first request to the last one that was read."""
        return 0.0 if self._start_ms is None else (self._last_ms - self._start_ms) / 1000

    def __iter__(self) -> Iterator[TraceRequest]:
        while line := self._next_line():
            self._line += 1
            if line := line.strip():
                yield self._request(line)

    def _next_line(self) -> bytes:
        try:
            line = self._file.readline(_LONGEST_LINE)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ConfigurationError(
                f"trace '{self.name}': not a whole gzip file; copy it again"
            ) from error
        if len(line) == _LONGEST_LINE:
            self._line += 1
            self._refuse("line", None, f"is longer than {_LONGEST_LINE >> 20} MiB")
        return line

    # ---------------------------------------------------------------- one line

    def _request(self, line: bytes) -> TraceRequest:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
            self._refuse("line", line[:40].decode(errors="replace"), f"is no JSON: {error}")
        if not isinstance(record, dict):
            self._refuse("line", record, "must be a JSON object with timestamp, input_length, …")
        arrival = self._arrival(record)
        if "tokens" in record:
            return self._from_tokens(record, arrival)
        return self._from_ids(record, arrival)

    def _from_ids(self, record: dict[str, Any], arrival: float) -> TraceRequest:
        input_length = self._integer(record, "input_length", 1)
        output_length = self._integer(record, "output_length", 0)
        size = self._hash_tokens
        ids = self._ids(record, "hash_ids")
        whole, stretches = input_length // size, -(-input_length // size)
        # Some traces leave out the last stretch where it is not whole: its tokens are the
        # request's own.
        if not whole <= len(ids) <= stretches:
            self._refuse(
                "hash_ids",
                f"{len(ids)} ids",
                f"must be {stretches}, one per {size} tokens of an input_length of {input_length} "
                "(--hash-tokens says how many tokens an id stands for)",
            )
        output_known = "output_hash_ids" in record
        if output_known:
            more = self._ids(record, "output_hash_ids")
            wanted = -(-(input_length + output_length) // size)
            if len(ids) + len(more) != wanted:
                self._refuse(
                    "output_hash_ids",
                    f"{len(more)} ids",
                    f"must be {wanted - stretches}: with {stretches} hash_ids they cover "
                    f"{input_length} + {output_length} tokens",
                )
            ids = np.concatenate((ids, more))
        return TraceRequest(
            self._line,
            arrival,
            input_length,
            output_length,
            self._system_length(record, input_length),
            HashedTokens(ids, size, -self._line),
            output_known,
        )

    def _from_tokens(self, record: dict[str, Any], arrival: float) -> TraceRequest:
        prompt = self._tokens(record, "tokens")
        if len(prompt) == 0:
            self._refuse("tokens", [], "must be at least one token")
        output_known = "output_tokens" in record
        if output_known:
            content = np.concatenate((prompt, self._tokens(record, "output_tokens")))
            output_length = len(content) - len(prompt)
        else:
            content, output_length = prompt, self._integer(record, "output_length", 0)
        for field, length in (("input_length", len(prompt)), ("output_length", output_length)):
            if field in record and self._integer(record, field, 0) != length:
                self._refuse(field, record[field], f"there are {length} tokens; leave it out")
        return TraceRequest(
            self._line,
            arrival,
            len(prompt),
            output_length,
            self._system_length(record, len(prompt)),
            content,
            output_known,
        )

    # ---------------------------------------------------------------- one field

    def _arrival(self, record: dict[str, Any]) -> float:
        value = self._field(record, "timestamp")
        if type(value) not in {int, float} or not 0 <= value < _LATEST_MS:
            self._refuse("timestamp", value, "must be milliseconds, 0 or more")
        if value < self._last_ms:
            self._refuse(
                "timestamp", value, f"is before {self._last_ms} of an earlier line; sort the trace"
            )
        self._last_ms = value
        if self._start_ms is None:
            self._start_ms = value
        return float(value - self._start_ms) / 1000

    def _integer(self, record: dict[str, Any], field: str, least: int) -> int:
        value = self._field(record, field)
        if type(value) is not int or not least <= value < _MOST_TOKENS:
            self._refuse(field, value, f"must be a whole number of tokens, {least} or more")
        return value

    def _system_length(self, record: dict[str, Any], input_length: int) -> int | None:
        if record.get("system_length") is None:
            return None
        value = self._integer(record, "system_length", 0)
        if value > input_length:
            self._refuse("system_length", value, f"is beyond the prompt of {input_length} tokens")
        return value

    def _ids(self, record: dict[str, Any], field: str) -> npt.NDArray[np.int64]:
        value = self._field(record, field)
        if not isinstance(value, list):
            self._refuse(field, value, "must be a list of whole numbers")
        if not value:
            return np.empty(0, np.int64)
        try:
            ids = np.array(value)
        except (ValueError, OverflowError):
            ids = np.empty(0, object)
        if ids.dtype != np.int64 or ids.ndim != 1 or ids.min() < 0:
            self._refuse(field, value, "must be a list of whole numbers from 0 to 2**63 - 1")
        return ids

    def _tokens(self, record: dict[str, Any], field: str) -> TokenArray:
        value = self._field(record, field)
        if not isinstance(value, list):
            self._refuse(field, value, "must be a list of token ids")
        try:
            return as_token_array(value, field=field)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.name}:{self._line}: {error}") from error

    def _field(self, record: dict[str, Any], field: str) -> Any:
        try:
            return record[field]
        except KeyError:
            self._refuse(field, None, f"is missing; the line has {', '.join(record) or 'nothing'}")

    def _refuse(self, field: str, value: object, remedy: str) -> Never:
        shown = "" if value is None else f"{str(value)[:60]!r} "
        raise ConfigurationError(f"{self.name}:{self._line}: {field}: {shown}{remedy}")


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
        missing = self.num_tokens - len(self.content)
        if not missing:
            return self.content
        output = HashedTokens(np.empty(0, np.int64), 2, -self.line).first(missing, 0)
        return np.concatenate((self.content, output))
