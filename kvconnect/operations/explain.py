"""The verb ``explain``: the stored tokens of a prompt, and the reasons why others are not used."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvconnect.backend import Backend, StoredEntry
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.io.identity import stored_as
from kvconnect.explain import outcome
from kvconnect.explain.outcome import Divergence, Outcome, Span, merged
from kvconnect.keys import KEY_NBYTES, BlockKey, Namespace, check_salt, salt_of, salt_tag
from kvconnect.operations.choice import ReadTokens, token_reader
from kvconnect.operations.progress import Progress
from kvconnect.operations.selection import namespaces_of
from kvconnect.operations.visit import each_block, listed, visiting
from kvconnect.tokens import TokenArray, common_length

if TYPE_CHECKING:
    from kvconnect.engine.request.tokenizer import Tokenizer

_ENGINES = ("vllm", "sglang", "trtllm", "transformers")
_DIGITS = 32  # the half of a model's tag that stands for its weights
_HALF = 16  # bytes of a model's tag that stand for its weights, and for its layout


@dataclass(frozen=True, slots=True)
class Identity:
    """The blocks that a request would use.

    Attributes:
        models: the beginnings of the tags of its model, in hexadecimal digits.
        engines: the same digits for other engines with this model, by the engine's name.
        salt: the tag of its salt.
        namespaces: digests of its salt and adapter.
        tokens_per_block: the tokens per block of its engine; ``None``: any.
    """

    models: tuple[str, ...]
    engines: Mapping[str, str]
    salt: bytes
    namespaces: frozenset[bytes]
    tokens_per_block: int | None = None


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The part of a prompt that is stored under one identity.

    Attributes:
        tokens: the leading tokens of the prompt, in whole blocks and tails, that all pool groups
            have.
        tokens_per_block: the tokens per block of its blocks.
        bytes_per_token: the bytes per token of the stored frames, all layers of pool group 0.
        model, layout: hexadecimal digits of the model's tag, as ``kvconnect ls`` shows them.
        differs: the reason why a request cannot use it; empty: it can.
    """

    tokens: int
    tokens_per_block: int
    bytes_per_token: float
    model: str
    layout: str
    differs: tuple[str, ...] = ()


@dataclass(slots=True)
class StoredPrompt:
    """The stored parts of one prompt.

    Attributes:
        prompt_tokens: its length.
        spans: its tokens by outcome: ``reused`` are stored for it, ``new`` are not stored, of
            ``no_state`` another pool group has no block at the end: a window's, or a snapshot of
            recurrent states. A store does not know whether it had them before.
        stored: the stored prefixes: first those that a request can use, then the longest.
        divergence: where the prompt differs from the blocks that are stored; ``None``: no other
            block continues it.
    """

    prompt_tokens: int = 0
    spans: tuple[Span, ...] = ()
    stored: list[StoredPrefix] = field(default_factory=list)
    divergence: Divergence | None = None


async def explain(url: str, tokens: TokenArray, identity: Identity) -> StoredPrompt:
    """Lists the blocks of the store of `url`; returns the stored parts of the prompt `tokens`.

    Takes some 100 bytes of memory per block, and some 300 bytes per block that may be of use.

    Raises:
        ConfigurationError: no part of the store can list its blocks.
        BackendUnavailable: the store fails.
    """
    index = _Index(tokens, token_reader(url))
    async with visiting(url, "read") as store:
        parts = listed(url, store)
        for name, part in parts.items():
            async with Progress(f"list {name}", 0, "blocks") as progress:
                async for entry in each_block(part, progress):
                    index.add(entry)
        found = sorted(
            (space.match(index.whole, index.stored) for space in index.spaces()),
            key=lambda one: (-one.end, -one.reach),
        )
        own = next((one for one in found if not _differs(one.space, identity)), None)
        divergence = None if own is None else await _divergence(own, parts, index)
    return _described(tokens, identity, found, own, divergence)


@dataclass(slots=True, eq=False)
class _Space:
    """The blocks of pool group 0 under one model's tag, namespace and size, by their parents.

    `others` are the tokens of the blocks of each other pool group. These are not chained in a
    store, as a window keeps only the ends of prompts, and states are at few of their blocks.
    """

    model: bytes
    namespace: bytes
    others: tuple[Collection[bytes], ...] = ()
    size: int = 0
    nbytes: float = 0.0
    after: dict[BlockKey, dict[BlockKey, bytes]] = field(default_factory=dict)

    def match(self, whole: bytes, stored: set[BlockKey]) -> _Found:
        """Returns the part of `whole` that is stored from its beginning on."""
        best: tuple[int, BlockKey | None] = (0, None)
        end = 0
        frontier = [(0, parent) for parent in self.after if parent not in stored]
        while frontier:
            at, parent = frontier.pop()
            for key, tokens in self.after.get(parent, {}).items():
                if whole.startswith(tokens, at):
                    reach = at + len(tokens)
                    best = max(best, (reach, key), key=lambda one: one[0])
                    if all(tokens in other for other in self.others):
                        end = max(end, reach)
                    frontier.append((reach, key))
        return _Found(self, end, *best)

    def roots(self, stored: set[BlockKey]) -> Iterator[bytes]:
        """Yields the tokens of blocks that begin a prompt."""
        for parent, blocks in self.after.items():
            if parent not in stored:
                yield from blocks.values()


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """The stored part of a prompt, in bytes.

    Attributes:
        space: its blocks.
        end: the bytes that all pool groups have.
        reach: the bytes that group 0 has.
        last: the last block of these.
    """

    space: _Space
    end: int
    reach: int
    last: BlockKey | None


class _Index:
    """The blocks that may belong to a prompt, or begin like it."""

    def __init__(self, tokens: TokenArray, read: ReadTokens) -> None:
        self.whole = tokens.astype(np.int32, copy=False).tobytes()
        self.read = read
        self.stored: set[BlockKey] = set()
        self._firsts = set(tokens.tolist())
        self._spaces: dict[tuple[bytes, bytes], dict[BlockKey, tuple[BlockKey, bytes, int]]] = {}
        self._groups: dict[bytes, set[int]] = {}  # other groups of each model
        self._others: dict[tuple[bytes, bytes, int], set[bytes]] = {}

    def add(self, entry: StoredEntry) -> None:
        """Adds a block, if its first token occurs in the prompt."""
        if entry.group:
            self._groups.setdefault(entry.model, set()).add(entry.group)
        else:
            self.stored.add(entry.key)
        if entry.parent is None or entry.tokens is None:
            return
        tokens = self.read(entry)
        if tokens is None or not len(tokens) or int(tokens[0]) not in self._firsts:
            return
        text = tokens.astype(np.int32, copy=False).tobytes()
        if entry.group:
            group = (entry.model, entry.namespace, entry.group)
            self._others.setdefault(group, set()).add(text)
        else:
            space = self._spaces.setdefault((entry.model, entry.namespace), {})
            space[entry.key] = (entry.parent, text, entry.nbytes)

    def spaces(self) -> Iterator[_Space]:
        """Yields the identities under which there are blocks."""
        for (model, namespace), blocks in self._spaces.items():
            groups = sorted(self._groups.get(model, ()))
            others = (self._others.get((model, namespace, group), ()) for group in groups)
            space = _Space(model, namespace, tuple(others))
            for key, (parent, tokens, nbytes) in blocks.items():
                space.after.setdefault(parent, {})[key] = tokens
                if len(tokens) // 4 > space.size:
                    space.size = len(tokens) // 4
                    space.nbytes = nbytes / space.size
            yield space


def _differs(space: _Space, wanted: Identity, own: _Space | None = None) -> tuple[str, ...]:
    """Returns why a request of identity `wanted` cannot use the blocks of `space`."""
    found = []
    model = space.model.hex()
    if not any(model.startswith(one) for one in wanted.models):
        engines = [name for name, one in wanted.engines.items() if model.startswith(one)]
        found.append(f"engine ({engines[0]})" if engines else "model")
    salt = salt_of(space.namespace)
    if space.namespace[:KEY_NBYTES] not in wanted.namespaces:
        same = salt is not None and salt == wanted.salt
        found.append("adapter" if same else "salt")
    if wanted.tokens_per_block not in {None, space.size} or (
        own is not None and space.size != own.size
    ):
        found.append("tokens_per_block")
    elif own is not None and not found and space.model[_HALF:] != own.model[_HALF:]:
        found.append("dtype" if space.nbytes != own.nbytes else "layout")
    return tuple(found)


async def _divergence(
    own: _Found, parts: Mapping[str, Backend], index: _Index
) -> tuple[int, TokenArray] | None:
    """Returns the first token that differs from the stored continuation, and that continuation."""
    rest = np.frombuffer(index.whole, np.int32)[own.reach // 4 :]
    following = list(own.space.roots(index.stored)) if own.last is None else []
    if own.last is not None:
        for part in parts.values():
            children = [one.key for one in await part.children(own.last)]
            entries = await part.describe(children) if children else ()
            known = (index.read(entry) for entry in entries if entry is not None)
            following += [one.astype(np.int32).tobytes() for one in known if one is not None]
    best: tuple[int, TokenArray] | None = None
    for text in following:
        tokens = np.frombuffer(text, np.int32)
        shared = common_length(tokens, rest)
        if shared < min(len(tokens), len(rest)) and (best is None or shared > best[0]):
            best = (shared, tokens[shared:])
    if best is None or own.reach + 4 * best[0] == 0:
        return None
    return own.reach // 4 + best[0], best[1]


def _described(
    tokens: TokenArray,
    identity: Identity,
    found: list[_Found],
    own: _Found | None,
    divergence: tuple[int, TokenArray] | None,
) -> StoredPrompt:
    stored = [
        StoredPrefix(
            one.end // 4,
            one.space.size,
            round(one.space.nbytes, 1),
            one.space.model[:_HALF].hex(),
            one.space.model[_HALF:].hex(),
            () if one is own else _differs(one.space, identity, None if own is None else own.space),
        )
        for one in found
        if one.end
    ]
    stored.sort(key=lambda one: (bool(one.differs), -one.tokens))
    last = len(tokens) - 1
    at = min(last, max(own.reach // 4 if own else 0, divergence[0] if divergence else 0))
    usable = at if own is None or own.end == own.reach else min(at, own.end // 4)
    spans = [Span(0, usable, Outcome.REUSED), Span(usable, at, Outcome.NO_STATE)]
    others = [one for one in stored if one.differs and one.tokens > at]
    if others:
        end = min(last, others[0].tokens)
        spans.append(Span(at, end, Outcome.NAMESPACE, ", ".join(others[0].differs)))
        at = end
    spans.append(Span(at, last, Outcome.DIVERGED if divergence and not others else Outcome.NEW))
    spans.append(Span(last, last + 1, Outcome.LAST))
    place = None
    if divergence is not None and divergence[0] < last:
        place = Divergence(divergence[0], tuple(divergence[1].tolist()))
    return StoredPrompt(len(tokens), merged(spans), stored, place)


def identity_of(
    url: str,
    model: str,
    directory: tuple[Path, str | None] | None,
    *,
    salt: str | None,
    lora: str | None,
    tokens_per_block: int | None,
) -> Identity:
    """Returns the identity of requests to kvconnect's own engine with this store.

    Args:
        url: the URL of the store; its codec is a part of the identity.
        model: the digits that the model's tag begins with.
        directory: the model's directory and the name of its weights; ``None``: only `model` is
            known.
        salt: the salt of the requests; ``None``: they have none.
        lora: their adapter; ``None``: they have none.
        tokens_per_block: the tokens per block of the engine; ``None``: any.

    Raises:
        ConfigurationError: `salt` is empty or too long; the codec cannot be used.
    """
    check_salt(salt, "salt")
    models, engines = [model], {}
    if directory is not None:
        from kvconnect.digest import model_digest

        digest = model_digest(directory[0], revision=directory[1])
        config = KvCacheConnectorConfig(url=url)
        models = [stored_as(digest, config).hex()[:_DIGITS]]
        engines = {
            name: stored_as(digest, config, engine=name).hex()[:_DIGITS] for name in _ENGINES
        }
    return Identity(
        tuple(models),
        engines,
        salt_tag(salt),
        namespaces_of(salt, lora) or frozenset({Namespace().encode()}),
        tokens_per_block,
    )


def with_texts(
    found: StoredPrompt, tokens: TokenArray, tokenizer: Tokenizer | None
) -> StoredPrompt:
    """Returns `found` with the texts around the token where prompt and stored blocks differ."""
    if found.divergence is None or tokenizer is None:
        return found
    texts = outcome.with_texts(found.divergence, tokens.tolist(), tokenizer.decode)
    return replace(found, divergence=texts)
