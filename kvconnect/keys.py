"""The block keys: names of KV content, the same in every process, rank and pool.

``root`` covers everything that changes the bytes of a block besides its tokens; ``key[i]`` chains
over the blocks before it, so a key stands for the whole prefix. A tenant's salt is part of the
root: its keys cannot be guessed from its tokens. Stores see only `store_key`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NewType

import numpy as np

from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout
from kvconnect.text import check_text, shown
from kvconnect.tokens import TokenArray, TokenBuffer

__all__ = [
    "FORMAT_VERSION",
    "KEY_NBYTES",
    "LONGEST_SALT",
    "BlockHash",
    "BlockKey",
    "KeyChain",
    "Namespace",
    "NamespaceId",
    "Shard",
    "chain_key",
    "chain_keys",
    "check_salt",
    "model_tag",
    "root_key",
    "salt_of",
    "salt_tag",
    "split_keys",
    "store_key",
    "store_keys",
]

FORMAT_VERSION = 1
KEY_NBYTES = 32
_SALT_NBYTES = 16
LONGEST_SALT = 1024
"""The most characters of a salt given to kvconnect; other engines' salts may be longer."""

BlockKey = NewType("BlockKey", bytes)
"""32 bytes."""


class BlockHash(bytes):
    """A `BlockKey` that converts to an integer, its first 64 bits.

    Connectors written for other engines expect such an integer as a block's hash.
    """

    __slots__ = ()

    def __index__(self) -> int:
        return int.from_bytes(self[:8], "little")


def _digest(kind: bytes, parts: Iterable[bytes]) -> BlockKey:
    # Length-prefixed, so that no two lists of parts look alike.
    state = hashlib.blake2b(digest_size=KEY_NBYTES, person=kind)
    for part in parts:
        state.update(struct.pack("<q", len(part)))
        state.update(part)
    return BlockKey(state.digest())


def _optional(value: str | int | None) -> bytes:
    # None differs from every value, 0 from "0".
    if value is None:
        return b"-"
    return b"i%d" % value if isinstance(value, int) else b"s" + value.encode()


def check_salt(cache_salt: object, field: str = "cache_salt") -> None:
    """Checks a salt where it is given to kvconnect: in Python, over HTTP, on the command line.

    Raises:
        ConfigurationError: `cache_salt` is neither ``None`` nor a string of 1 to 1,024 characters.
            The message names `field` and shows the beginning of the salt.
    """
    if cache_salt is None:
        return
    if not isinstance(cache_salt, str):
        raise ConfigurationError(f"{field}: {shown(cache_salt)} must be a string, or None")
    if not cache_salt:
        raise ConfigurationError(
            f"{field}: '' must not be empty; give 1 to {LONGEST_SALT:,} characters, or no salt"
        )
    if len(cache_salt) > LONGEST_SALT:
        raise ConfigurationError(
            f"{field}: {shown(cache_salt)} has {len(cache_salt):,} characters; give 1 to "
            f"{LONGEST_SALT:,}, or no salt"
        )


@dataclass(frozen=True, slots=True)
class NamespaceId:
    """The digest of a namespace, kept after the requests of that namespace have ended.

    Attributes:
        digest: 32 bytes, of all fields of the `Namespace`.
        lora_id: the namespace's adapter.
        has_cache_salt: true if the namespace has a salt.
    """

    digest: bytes
    lora_id: int | str | None
    has_cache_salt: bool

    def encode(self) -> bytes:
        """Returns the digest, as `Namespace.encode` does."""
        return self.digest


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace: requests share cached blocks only within one.

    A namespace holds the texts of the request. Objects that outlive the request hold only `id`,
    because a salt may be of any length.

    Attributes:
        cache_salt: the tenant's salt, never empty.
        lora_id: the adapter. For stores this must be a digest of the adapter, not a local number.
        extra_key: any other value that changes the KV of equal tokens, such as a picture's hash.
        id: the namespace's digest, without salt and extra key.
    """

    cache_salt: str | None = None
    lora_id: int | str | None = None
    extra_key: str | int | None = None
    id: NamespaceId = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise ConfigurationError(
                f"cache_salt: {shown(self.cache_salt)} must be a string, or None"
            )
        if self.cache_salt == "":
            raise ConfigurationError("cache_salt: '' must not be empty; use None for no salt")
        for name in ("lora_id", "extra_key"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, str, type(None))):
                raise ConfigurationError(
                    f"{name}: {shown(value)} is a {type(value).__name__}; "
                    "give an integer, a string, or None"
                )
        for name in ("cache_salt", "lora_id", "extra_key"):
            if isinstance(value := getattr(self, name), str):
                check_text(name, value)
        parts = (_optional(self.cache_salt), _optional(self.lora_id), _optional(self.extra_key))
        digest = _digest(b"kvc-namespace", parts)
        short = NamespaceId(digest, self.lora_id, self.cache_salt is not None)
        object.__setattr__(self, "id", short)

    def encode(self) -> bytes:
        """Returns 32 bytes that differ whenever a field does."""
        return self.id.digest

    def tag(self) -> bytes:
        """Returns the tag of the namespace in stores: `encode`, then the `salt_tag` of its salt."""
        return self.id.digest + salt_tag(self.cache_salt)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the model that this rank holds."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1


def root_key(
    model_digest: bytes, layouts: Sequence[KvCacheLayout], namespace: Namespace | NamespaceId
) -> BlockKey:
    """Returns the key before the first block of a namespace of one model and cache geometry."""
    geometry = b"".join(layout.fingerprint() for layout in layouts)
    version = struct.pack("<I", FORMAT_VERSION)
    return _digest(b"kvc-root", (version, model_digest, geometry, namespace.encode()))


def salt_tag(cache_salt: str | None) -> bytes:
    """Returns the 16 bytes that identify a tenant in stores, equal for all models and engines."""
    return _digest(b"kvc-salt", (_optional(cache_salt),))[:_SALT_NBYTES]


def salt_of(namespace: bytes) -> bytes | None:
    """Returns the `salt_tag` in the namespace field of a stored block; ``None`` if it has none.

    Older versions, and some engines with adapters, save blocks without it.
    """
    has_one = len(namespace) == KEY_NBYTES + _SALT_NBYTES
    return namespace[KEY_NBYTES:] if has_one else None


def model_tag(model_digest: bytes, layouts: Sequence[KvCacheLayout] = ()) -> bytes:
    """Returns the tag of a model in stores: 16 bytes of its digest, then 16 of its cache geometry.

    Without `layouts` it returns only the first 16 bytes, which the tags of all geometries share.
    """
    if not layouts:
        return model_digest[:16]
    geometry = b"".join(layout.fingerprint() for layout in layouts)
    return model_digest[:16] + _digest(b"kvc-geometry", (geometry,))[:16]


def chain_key(parent: BlockKey, tokens: TokenArray) -> BlockKey:
    """Returns the key of the block that holds `tokens` (whole, or a tail) after `parent`."""
    return BlockKey(chain_keys(parent, tokens.tobytes(), len(tokens)))


_BLOCK = hashlib.blake2b(
    struct.pack("<q", KEY_NBYTES), digest_size=KEY_NBYTES, person=b"kvc-block"
)  # the first bytes that `_digest` hashes for every block: the length of the parent


def chain_keys(parent: bytes, tokens: bytes | bytearray, tokens_per_block: int) -> bytes:
    """Returns the keys of consecutive blocks after `parent`, 32 bytes each, one after the other.

    The digests are those of ``_digest(b"kvc-block", (parent, <number of tokens>, <tokens>))``, at a
    sixth of its cost: a copied state and one update with one block of the hash, at 16 tokens.

    Args:
        parent: 32 bytes.
        tokens: as native int32 bytes; the last block may have less than `tokens_per_block`.
        tokens_per_block: above 0.
    """
    stride = 4 * tokens_per_block
    whole = len(tokens) - len(tokens) % stride
    middle = struct.pack("<qqq", 8, tokens_per_block, stride)
    copy = _BLOCK.copy
    keys = []
    for low in range(0, whole, stride):
        state = copy()
        state.update(parent + middle + tokens[low : low + stride])
        parent = state.digest()
        keys.append(parent)
    if whole < len(tokens):
        rest = tokens[whole:]
        keys.append(chain_keys(parent, rest, len(rest) // 4))
    return b"".join(keys)


def split_keys(keys: bytes | bytearray) -> list[BlockKey]:
    """Splits keys that lie one after the other."""
    # At a fifth of the cost of slicing.
    found: list[BlockKey] = np.frombuffer(keys, f"V{KEY_NBYTES}").tolist()
    return found


def store_key(key: BlockKey, group: int = 0, shard: Shard = Shard()) -> BlockKey:
    """Returns the key in a store: `key` for one pool group and one share of the model.

    With tensor parallelism `shard` is the number of the share of KV heads, which may differ from
    the rank's number: see `kvconnect.shards`.
    """
    return store_keys((key,), group, shard)[0]


_STORED = hashlib.blake2b(
    struct.pack("<q", KEY_NBYTES), digest_size=KEY_NBYTES, person=b"kvc-store"
)  # computed like `_BLOCK`


def store_keys(keys: Iterable[BlockKey], group: int = 0, shard: Shard = Shard()) -> list[BlockKey]:
    """Returns the `store_key` of each of `keys`, at half the cost."""
    where = struct.pack("<5q", group, shard.tp_rank, shard.tp_size, shard.pp_rank, shard.pp_size)
    end = struct.pack("<q", len(where)) + where
    copy = _STORED.copy
    found = []
    for key in keys:
        state = copy()
        state.update(key + end)
        found.append(BlockKey(state.digest()))
    return found


class KeyChain:
    """The lazily hashed keys of one request's full blocks.

    It is made with the request and shared by block manager, connector and events, so that each
    block is hashed once. It follows `tokens`, which its owner extends; on a rewind the owner calls
    `truncate`. Not thread-safe.
    """

    __slots__ = ("_digests", "_tokens", "root", "tokens_per_block")

    def __init__(self, root: BlockKey, tokens_per_block: int, tokens: TokenBuffer) -> None:
        self.root = root
        self.tokens_per_block = tokens_per_block
        self._tokens = tokens
        self._digests = bytearray()

    def __len__(self) -> int:
        """The number of full blocks of the tokens so far."""
        return len(self._tokens) // self.tokens_per_block

    @property
    def tokens(self) -> TokenArray:
        """The tokens so far, as a view that is not to be written to."""
        return self._tokens.view

    @property
    def num_hashed(self) -> int:
        """The number of leading blocks whose keys are known already."""
        return len(self._digests) // KEY_NBYTES

    def keys(self, start: int = 0, stop: int | None = None) -> list[BlockKey]:
        """Returns the keys of the full blocks ``start..stop`` (default: all)."""
        stop = len(self) if stop is None else min(stop, len(self))
        self._hash_up_to(stop)
        return split_keys(self._digests[start * KEY_NBYTES : stop * KEY_NBYTES])

    def digests(self, start: int, stop: int) -> bytes:
        """Returns the key before block `start`, then those of the full blocks ``start..stop``."""
        self._hash_up_to(min(stop, len(self)))
        return self._key_before(start) + self._digests[start * KEY_NBYTES : stop * KEY_NBYTES]

    def parent(self, block: int) -> BlockKey:
        """Returns the key before block number `block`: its predecessor's, or the root."""
        return self.keys(block - 1, block)[0] if block else self.root

    def tail(self, num_tokens: int) -> BlockKey:
        """Returns the key of the partial block that ends at `num_tokens`."""
        start = num_tokens - num_tokens % self.tokens_per_block
        if start == num_tokens or num_tokens > len(self._tokens):
            raise ConfigurationError(f"num_tokens: {num_tokens} does not end a partial block")
        parent = self.parent(start // self.tokens_per_block)
        return chain_key(parent, self._tokens.view[start:num_tokens])

    def truncate(self, num_tokens: int) -> None:
        """Forgets keys of blocks that do not end within the first `num_tokens`."""
        del self._digests[num_tokens // self.tokens_per_block * KEY_NBYTES :]

    # ---------------------------------------------------------------- on another thread

    def snapshot(self, num_tokens: int | None = None) -> KeyChain:
        """Returns a copy of the first tokens, or of all, for another thread to hash."""
        taken = self._over(self._tokens.snapshot(num_tokens))
        taken.learn(self._digests)
        return taken

    def adopt(self, snapshot: KeyChain) -> None:
        """Copies the keys of a `snapshot` of this chain, which no other thread may hash meanwhile.

        Does nothing if the tokens have changed since the snapshot.
        """
        known = min(snapshot.num_hashed, len(self))
        end = known * self.tokens_per_block
        if known > self.num_hashed and self._tokens.starts_as(snapshot._tokens, end):
            self._digests = snapshot._digests[: known * KEY_NBYTES]

    # ---------------------------------------------------------------- exchange with the block tree

    def known(self, start: int, parent: bytes, tokens: bytearray, low: int) -> bytes:
        """Returns the known keys from block `start` on, without hashing.

        Returns an empty list if those blocks do not follow `parent`, or their tokens are not
        ``tokens[low:]`` (in bytes).
        """
        size = self.tokens_per_block
        stop = min(start + (len(tokens) - low) // (4 * size), self.num_hashed)
        if stop <= start or self._key_before(start) != parent:
            return b""
        if not tokens.startswith(self._tokens.view[start * size : stop * size].tobytes(), low):
            return b""
        return bytes(self._digests[start * KEY_NBYTES : stop * KEY_NBYTES])

    def learn(self, digests: bytes | bytearray) -> None:
        """Adds known keys of the leading blocks, so that they are not hashed again."""
        if len(digests) > len(self._digests):
            self._digests = bytearray(digests[: len(self) * KEY_NBYTES])

    # ---------------------------------------------------------------- inside

    def _over(self, tokens: TokenBuffer) -> KeyChain:
        # The same chain over other tokens.
        return KeyChain(self.root, self.tokens_per_block, tokens)

    def _key_before(self, block: int) -> bytes:
        # Returns the key before `block`, whose predecessor is hashed.
        high = block * KEY_NBYTES
        return bytes(self._digests[high - KEY_NBYTES : high]) if block else self.root

    def _hash_up_to(self, stop: int) -> None:
        known, size = self.num_hashed, self.tokens_per_block
        if known < stop:
            tokens = self._tokens.view[known * size : stop * size].tobytes()
            self._digests += chain_keys(self._key_before(known), tokens, size)
