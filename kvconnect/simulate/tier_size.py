"""The size of a tier, or a rate, as the user writes it: in bytes, or in tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from kvconnect.backends.url import parse_size
from kvconnect.errors import ConfigurationError

_TOKENS = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)tok(?:ens?)?", re.IGNORECASE)
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


@dataclass(frozen=True, slots=True)
class TierSize:
    """A size: either `num_bytes` or `num_tokens` is set; `text` is the user's own."""

    text: str
    num_bytes: int | None = None
    num_tokens: int | None = None

    @classmethod
    def parse(cls, text: str, *, field: str) -> Self:
        """Parses ``16GiB``, ``1.5TB``, ``0``; or ``200000tokens``, ``500ktok`` (decimal).

        Raises:
            ConfigurationError: names `field`, the text and what is right.
        """
        text = text.strip()
        if text == "0":
            return cls(text, num_bytes=0)
        match = _TOKENS.fullmatch(text)
        if match is not None:
            tokens = float(match[1]) * _DECIMAL[match[2].lower()]
            if tokens >= 1 << 63:  # infinite for hundreds of digits
                raise ConfigurationError(f"{field}={text[:64]}: must be below 2^63 tokens")
            return cls(text, num_tokens=int(tokens))
        if text.isdigit():
            raise ConfigurationError(
                f"{field}={text}: has no unit; write {text}tokens, or bytes as in 16GiB"
            )
        return cls(text, num_bytes=parse_size(text, field=field))

    def num_blocks(self, tokens_per_block: int, token_nbytes: int | None, *, field: str) -> int:
        """Returns the blocks that fit; tokens are rounded up to whole blocks, bytes down.

        Raises:
            ConfigurationError: it is in bytes, and the bytes of a token are not given.
        """
        if self.num_tokens is not None:
            return -(-self.num_tokens // tokens_per_block)
        if not self.num_bytes:
            return 0
        return self.num_bytes // (tokens_per_block * self._known(token_nbytes, field))

    def tokens(self, token_nbytes: int | None, *, field: str) -> float:
        """Returns the tokens that fit, with their fraction.

        Raises:
            ConfigurationError: it is in bytes, and the bytes of a token are not given.
        """
        if self.num_tokens is not None:
            return float(self.num_tokens)
        if not self.num_bytes:
            return 0.0
        return self.num_bytes / self._known(token_nbytes, field)

    def _known(self, token_nbytes: int | None, field: str) -> int:
        if token_nbytes is None:
            raise ConfigurationError(
                f"{field}={self.text}: bytes need the size of a token; give --bytes-per-token or "
                "--model DIR, or a size in tokens such as 500ktok"
            )
        return token_nbytes
