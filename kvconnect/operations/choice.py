"""Finds the wanted blocks among those that a store lists."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeAlias

import numpy as np

from kvconnect.backend import Backend, StoredEntry
from kvconnect.backends.registry import codecs_of
from kvconnect.errors import ConfigurationError
from kvconnect.keys import BlockKey
from kvconnect.operations.progress import Progress
from kvconnect.operations.selection import Selection
from kvconnect.operations.visit import each_block
from kvconnect.operations.which import FEWEST_DIGITS, Wanted, WantedPrompt
from kvconnect.tokens import TokenArray

ReadTokens: TypeAlias = Callable[[StoredEntry], TokenArray | None]
"""Returns the tokens of an entry, decrypted where they are encrypted; ``None``: not known."""

# A part of each key identifies the block, and takes least memory as an integer.
_SHORT = 8
# A block whose beginning is not stored belongs to a prompt if so many tokens are the prompt's: pool
# groups with a window keep only the ends of prompts.
_TELLING_TOKENS = 8


@dataclass(slots=True)
class Chosen:
    """The wanted blocks of a store.

    Attributes:
        keys: their store keys, each after that of the block before it.
        tokens: the tokens of the wanted prompts that are stored, from the beginning of each.
        missing: the other tokens of the wanted prompts.
        missing_keys: the wanted keys that no block has.
        unknown: blocks that may be the wanted tenant's: the store does not know their tenants.
    """

    keys: list[BlockKey] = field(default_factory=list)
    tokens: int = 0
    missing: int = 0
    missing_keys: int = 0
    unknown: int = 0


def token_reader(url: str) -> ReadTokens:
    """Returns a function that reads tokens as the codec of `url` stores them.

    Raises:
        ConfigurationError: the key file cannot be read.
    """
    cipher = codecs_of(url).cipher
    if cipher is None:
        return lambda entry: entry.tokens
    return lambda entry: (
        None
        if entry.tokens is None
        else cipher.decrypt_tokens(entry.tokens, entry.key, entry.parent)
    )


async def choose(stores: Mapping[str, Backend], wanted: Wanted, read: ReadTokens) -> Chosen:
    """Lists all blocks of `stores`, the parts of one store, and returns the wanted ones.

    A prompt's blocks are found by their tokens, so under every cache geometry and on every rank.
    Takes some 100 bytes of memory per block (200 if `wanted.continued`), and some 300 bytes per
    block that may be wanted.

    Raises:
        BackendUnavailable: a store fails.
        ConfigurationError: several blocks have a wanted key's digits.
    """
    finder = _Finder(wanted, read)
    for name, store in stores.items():
        async with Progress(f"list {name}", 0, "blocks") as progress:
            async for entry in each_block(store, progress):
                finder.add(entry)
    return finder.chosen()


class _Finder:
    def __init__(self, wanted: Wanted, read: ReadTokens) -> None:
        self._wanted = wanted
        by_selection: dict[Selection, list[WantedPrompt]] = {}
        for prompt in wanted.prompts:
            by_selection.setdefault(prompt.selection, []).append(prompt)
        self._indexes = [
            _PromptIndex(selection, prompts, read) for selection, prompts in by_selection.items()
        ]
        self._all = not wanted.prompts and not wanted.keys
        self._related = wanted.continued or (wanted.ancestors and bool(wanted.keys))
        self._stored: set[int] = set()
        self._parents: dict[BlockKey, BlockKey | None] = {}
        self._named: dict[str, set[BlockKey]] = {key: set() for key in wanted.keys}
        self._digits: dict[str, list[str]] = {}
        for key in self._named:
            self._digits.setdefault(key[:FEWEST_DIGITS], []).append(key)
        self._unknown: set[int] = set()
        self._read = read
        self._contents: dict[BlockKey, bytes] = {}  # and the next only if `wanted.continued`
        self._apart: list[BlockKey] = []

    def add(self, entry: StoredEntry) -> None:
        short = _short(entry.key)
        selection = self._wanted.selection
        if self._related or (self._all and selection.fits(entry)):
            self._parents[entry.key] = entry.parent
        if self._wanted.continued and (tokens := self._read(entry)) is not None:
            self._contents[entry.key] = _content(entry, tokens)
            if entry.group:
                self._apart.append(entry.key)
        for digits in self._digits.get(entry.key.hex()[:FEWEST_DIGITS], ()):
            if entry.key.hex().startswith(digits):
                self._named[digits].add(entry.key)
                self._parents.setdefault(entry.key, entry.parent)
        for index in self._indexes:
            index.add(entry)
            if index.selection.cannot_tell(entry):
                self._unknown.add(short)
        if self._indexes:
            self._stored.add(short)
        if self._all and selection.cannot_tell(entry):
            self._unknown.add(short)

    def chosen(self) -> Chosen:
        chosen = Chosen(unknown=len(self._unknown))
        found: dict[BlockKey, BlockKey | None] = {}
        if self._all:
            found = self._parents
        for digits, keys in self._named.items():
            if len(keys) > 1:
                raise ConfigurationError(
                    f"key: '{digits}': {len(keys)} blocks begin with these digits; give more digits"
                )
            chosen.missing_keys += not keys
            found |= {key: self._parents[key] for key in keys}
        for index in self._indexes:
            for prompt in index.prompts:
                blocks, covered = index.match(prompt.tokens, self._stored)
                found |= blocks
                chosen.tokens += covered
                chosen.missing += len(prompt.tokens) - covered
        if self._wanted.ancestors and self._named:
            found |= self._before(found)
        if self._wanted.continued:
            found |= self._after(found)
            alike = self._alike(found)
            found |= alike | self._after(alike)
        chosen.keys = _parents_first(found)
        return chosen

    def _before(self, found: Iterable[BlockKey]) -> dict[BlockKey, BlockKey | None]:
        before: dict[BlockKey, BlockKey | None] = {}
        for key in found:
            at: BlockKey | None = key
            while at in self._parents and at not in before:
                before[at] = at = self._parents[at]  # type: ignore[index]
        return before

    def _after(self, found: Iterable[BlockKey]) -> dict[BlockKey, BlockKey | None]:
        children: dict[BlockKey | None, list[BlockKey]] = {}
        for key, parent in self._parents.items():
            children.setdefault(parent, []).append(key)
        after: dict[BlockKey, BlockKey | None] = {}
        frontier = list(found)
        while frontier:
            for child in children.pop(frontier.pop(), ()):
                after[child] = self._parents[child]
                frontier.append(child)
        return after

    def _alike(self, found: Iterable[BlockKey]) -> dict[BlockKey, BlockKey | None]:
        """Returns the blocks of `_apart` with the tokens of a block in `found`.

        They are blocks of windows and states: the block before them is often not stored, so that
        they cannot be found by their parents.
        """
        contents = {self._contents.get(key) for key in found}
        return {
            key: self._parents[key]
            for key in self._apart
            if self._parents[key] not in self._parents and self._contents[key] in contents
        }


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    key: BlockKey
    parent: BlockKey
    tokens: bytes


class _PromptIndex:
    """The blocks that fit one selection and may belong to one of `prompts`."""

    def __init__(
        self, selection: Selection, prompts: Sequence[WantedPrompt], read: ReadTokens
    ) -> None:
        self.selection = selection
        self.prompts = prompts
        self._read = read
        # The first two tokens of a block rule out most blocks of other prompts.
        pairs = [_pairs(prompt.tokens) for prompt in prompts]
        self._pairs = np.unique(np.concatenate(pairs)) if pairs else np.empty(0, np.int64)
        self._by_parent: dict[BlockKey, dict[BlockKey, _Block]] = {}

    def add(self, entry: StoredEntry) -> None:
        if entry.parent is None or entry.tokens is None or not self.selection.fits(entry):
            return
        tokens = self._read(entry)
        if tokens is None or not len(tokens) or not self._may_belong(tokens):
            return
        block = _Block(entry.key, entry.parent, tokens.astype(np.int32, copy=False).tobytes())
        self._by_parent.setdefault(block.parent, {})[block.key] = block

    def match(
        self, tokens: TokenArray, stored: Collection[int]
    ) -> tuple[dict[BlockKey, BlockKey | None], int]:
        """Returns the prompt's blocks with their parents, and how many leading tokens they hold.

        Args:
            tokens: the tokens of the prompt.
            stored: the beginnings of all keys in the store.
        """
        whole = tokens.astype(np.int32, copy=False).tobytes()
        found: dict[BlockKey, BlockKey | None] = {}
        covered = 0
        frontier: list[tuple[_Block, int, bool]] = []
        for parent, blocks in self._by_parent.items():
            if _short(parent) not in stored:
                for block in blocks.values():
                    frontier += [(block, at, at == 0) for at in _starts(block, whole)]
        while frontier:
            block, start, from_beginning = frontier.pop()
            end = start + len(block.tokens)
            if block.key in found or whole[start:end] != block.tokens:
                continue
            found[block.key] = block.parent
            if from_beginning:
                covered = max(covered, end)
            follows = self._by_parent.get(block.key, {})
            frontier += [(child, end, from_beginning) for child in follows.values()]
        return found, covered // 4

    def _may_belong(self, tokens: TokenArray) -> bool:
        if len(tokens) == 1:
            return True
        pair = _pairs(tokens[:2])[0]
        at = int(np.searchsorted(self._pairs, pair))
        return at < len(self._pairs) and bool(self._pairs[at] == pair)


def _starts(block: _Block, whole: bytes) -> list[int]:
    """Returns the offsets in `whole`, in bytes, where a block without stored parent may begin.

    They are 0 and the multiples of the block's length.
    """
    step = len(block.tokens)
    aligned = range(0, len(whole), step) if step >= 4 * _TELLING_TOKENS else (0,)
    return [at for at in aligned if whole.startswith(block.tokens, at)]


def _pairs(tokens: TokenArray) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns each pair of neighbouring tokens as one integer."""
    wide = tokens.astype(np.int64)
    return (wide[:-1] << 32) | wide[1:]


def _content(entry: StoredEntry, tokens: TokenArray) -> bytes:
    """Returns a digest of the tokens of a block and of the model and tenant that they belong to."""
    digest = blake2b(digest_size=16, key=entry.model[:32])
    digest.update(len(entry.namespace).to_bytes(4) + entry.namespace)
    digest.update(tokens.astype(np.int32, copy=False).tobytes())
    return digest.digest()


def _short(key: BlockKey) -> int:
    return int.from_bytes(key[:_SHORT])


def _parents_first(parents: Mapping[BlockKey, BlockKey | None]) -> list[BlockKey]:
    ordered: list[BlockKey] = []
    seen: set[BlockKey] = set()
    for key in parents:
        path: list[BlockKey] = []
        at: BlockKey | None = key
        while at is not None and at in parents and at not in seen:
            seen.add(at)
            path.append(at)
            at = parents[at]
        ordered += reversed(path)
    return ordered
