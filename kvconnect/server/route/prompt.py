"""The beginning of a prompt, as a router without a tokenizer sees it, and sets of prefixes."""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Self

from kvconnect.errors import ConfigurationError
from kvconnect.events.links import prefix_links
from kvconnect.keys import Namespace

_CHARACTERS = 256
_TOKENS = 64
_MAX_HASHED = 2048
_HASH_NBYTES = 16
_AT_ONCE = 1 << 15  # the interpreter does nothing else meanwhile


@dataclass(frozen=True, slots=True)
class Prompt:
    """The beginning of a request's prompt, in pieces of 256 characters or 64 token ids.

    Attributes:
        prefixes: a chained hash of each full piece, from the first one: equal hashes stand for
            equal prompts up to there, under one path, model and salt. 2,048 pieces at most.
        num_pieces: the number of pieces of the whole prompt, an incomplete last one included.
        single: true if a prefill server may compute it: it is one prompt, and its log probabilities
            are not requested.
        tokens: the token ids; ``None`` for text that no server has tokenized.
        namespace: the name of its salt in events; empty: it has none.
    """

    prefixes: tuple[bytes, ...]
    num_pieces: int
    single: bool
    tokens: array[int] | None = None
    namespace: str = ""
    _links: dict[int, list[bytes]] = field(default_factory=dict, repr=False, compare=False)

    def links(self, block_size: int) -> list[bytes]:
        """Returns the hashes of its full blocks, for `HeldBlocks`; each is computed once."""
        found = self._links.get(block_size)
        if found is None:
            links = prefix_links(self.tokens or (), block_size, None, self.namespace)
            found = self._links[block_size] = list(links)
        return found

    @classmethod
    def of(cls, path: str, body: Mapping[str, Any]) -> Self:
        """Returns the prompt of `body`, any JSON object sent to `path`."""
        first, single = _first(body)
        if body.get("prompt_logprobs") is not None or body.get("echo"):
            single = False  # the decode server computes it in any case
        if isinstance(first, str):
            size, unit = _CHARACTERS, 4
            data = first[: _MAX_HASHED * size].encode("utf-32-le", "surrogatepass")
        else:
            size, unit = _TOKENS, 8
            data = first[: _MAX_HASHED * size].tobytes()
        root = [path, body.get("model"), body.get("cache_salt"), isinstance(first, str)]
        if "messages" in body:
            root.append(body.get("chat_template_kwargs"))
        chained = blake2b(json.dumps(root, sort_keys=True).encode(), digest_size=_HASH_NBYTES)
        prefixes = []
        step = size * unit
        for start in range(0, len(data) // step * step, step):
            chained.update(data[start : start + step])
            prefixes.append(chained.digest())
        tokens = None if isinstance(first, str) else first
        return cls(tuple(prefixes), -(-len(first) // size), single, tokens, _namespace_of(body))


class HeldPrefixes:
    """A bounded set of prefixes by their chained hashes; the least recently used are removed.

    Args:
        limit: the most prefixes in the set.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def matched(self, prefixes: Sequence[bytes]) -> int:
        """Returns how many leading ones of `prefixes` are held; changes nothing."""
        for count, prefix in enumerate(prefixes):
            if prefix not in self._held:
                return count
        return len(prefixes)

    def add(self, prefixes: Sequence[bytes]) -> None:
        """Adds `prefixes` that were computed or used."""
        # The longest first, so that a prompt is removed from its end.
        for prefix in reversed(prefixes):
            self._held[prefix] = None
            self._held.move_to_end(prefix)
        while len(self._held) > self._limit:
            self._held.popitem(last=False)

    def clear(self) -> None:
        """Forgets all prefixes."""
        self._held.clear()


def _namespace_of(body: Mapping[str, Any]) -> str:
    salt = body.get("cache_salt")
    if salt is None or not isinstance(salt, str):
        return ""
    try:
        return Namespace(salt).id.digest.hex()
    except ConfigurationError:  # the server will refuse it
        return ""


def _first(body: Mapping[str, Any]) -> tuple[str | array[int], bool]:
    """Returns the first prompt, and whether there is no other.

    Prompts of a wrong type are left for the server to refuse.
    """
    if "messages" in body:
        return json.dumps(body["messages"]), True
    given = body.get("prompt")
    if isinstance(given, list) and given and not isinstance(given[0], int):
        first, single = given[0], len(given) == 1
    else:
        first, single = given, True
    if isinstance(first, str):
        return first, single
    if not isinstance(first, list):
        return json.dumps(first), single
    tokens = array("q")
    try:
        for start in range(0, len(first), _AT_ONCE):
            tokens.extend(first[start : start + _AT_ONCE])
    except (TypeError, OverflowError):
        return json.dumps(first), single
    return tokens, single
