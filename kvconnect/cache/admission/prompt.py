"""A prompt that asks for blocks."""

from __future__ import annotations

from typing import NamedTuple

from kvconnect.cache.sequence.sequence import check_position
from kvconnect.errors import ConfigurationError
from kvconnect.keys import Namespace, NamespaceId
from kvconnect.request import ExternalMatch
from kvconnect.tokens import Tokens, as_token_array

_COMMON = Namespace().id
"""The namespace without salt, adapter or other key; a dictionary finds it by identity."""


def namespace_of(
    cache_salt: str | None, lora_id: int | str | None, extra_key: str | int | None
) -> NamespaceId:
    """Returns the namespace of these arguments of `BlockManager.add_sequence`.

    Raises:
        ConfigurationError: (a ``ValueError``) the salt is empty.
    """
    if cache_salt is None and lora_id is None and extra_key is None:
        return _COMMON
    return Namespace(cache_salt, lora_id, extra_key).id


class Prompt(NamedTuple):
    """The arguments of `BlockManager.add_sequence`, checked.

    Attributes:
        namespace: the namespace whose blocks may be reused.
        tokens: native int32 bytes; the sequence owns them after admission.
        max_matched: the most tokens that may be reused; ``None`` for no limit.
        first_chunk: the tokens to compute that window pools allocate blocks for; ``None`` for all.
        external_end: the leading tokens that an external store fills before any is computed;
            ``None`` without a store.
        beside: true if the tokens before `external_end` may be computed while the store fills the
            last ones.
    """

    namespace: NamespaceId
    tokens: bytearray
    max_matched: int | None = None
    first_chunk: int | None = None
    external_end: int | None = None
    beside: bool = False

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return len(self.tokens) // 4

    @staticmethod
    def of(tokens: Tokens, namespace: NamespaceId = _COMMON) -> Prompt:
        """Returns a prompt of a copy of `tokens`, without limits.

        Raises:
            ConfigurationError: (a ``ValueError``) there are no tokens, or one is outside int32.
        """
        array = as_token_array(tokens)
        if len(array) == 0:
            raise ConfigurationError("tokens: at least one is needed")
        return Prompt(namespace, bytearray(array))

    def within(
        self,
        *,
        max_matched: int | None = None,
        first_chunk: int | None = None,
        external_end: int | None = None,
        beside: bool = False,
    ) -> Prompt:
        """Returns the same prompt with these limits instead of its own; shares the tokens.

        Raises:
            ConfigurationError: (a ``ValueError``) a limit is out of range.
        """
        if max_matched is not None:
            _check_least("max_matched", max_matched, 0)
        if first_chunk is not None:
            _check_least("first_chunk", first_chunk, 1)
        if external_end is not None:
            check_position("external_end", external_end, self.num_tokens)
        return Prompt(
            self.namespace, self.tokens, max_matched, first_chunk, external_end, beside=beside
        )

    def filled_by(self, match: ExternalMatch, first_chunk: int | None) -> Prompt:
        """Returns the same prompt, of which a store fills the tokens of `match`."""
        return self.within(
            max_matched=match.position,
            first_chunk=first_chunk,
            external_end=match.end,
            beside=match.overlaps,
        )


def _check_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigurationError(f"{field}: {value} must be at least {least}, or None")
