"""What a store implements: four methods, and a few more if it can.

Backends are plain. They move opaque bytes under 32-byte keys and need no retries, no timeouts, no
checksums and no metrics of their own: the framework puts those around every backend, yours too
(`kvconnect.backends.registry.open_backend`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.tokens import TokenArray

__all__ = [
    "DEFAULT_RETENTION_PRIORITY",
    "MAX_CHILDREN",
    "Backend",
    "Child",
    "StoredBlock",
    "StoredEntry",
]

DEFAULT_RETENTION_PRIORITY = 35
"""Of blocks that were given none (TensorRT-LLM's default)."""

MAX_CHILDREN = 256
"""How many blocks `Backend.children` lists."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlock:
    """One block on its way to a store. `key` and `data` are all that a plain store needs.

    Attributes:
        key: what the store knows it by.
        data: 1-D uint8 tensor on the host, one frame; the store reads it, never writes to it.
        parent: store key of the block before it; for the first of a prompt that of its namespace's
            root, which no block has. ``None``: not known.
        tokens: the block's own token ids; fewer than a whole block's for a tail.
        priority: retention priority, 0 (goes first) to 100.
        namespace: digest of salt and adapter, for pruning.
        model: of the model and its cache geometry, for pruning; see `kvconnect.keys.model_tag`.
        group: pool group.
    """

    key: BlockKey
    data: Tensor
    parent: BlockKey | None = None
    tokens: TokenArray | None = None
    priority: int = DEFAULT_RETENTION_PRIORITY
    namespace: bytes = b""
    model: bytes = b""
    group: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """A stored block that follows another one: its store key and its own tokens."""

    key: BlockKey
    tokens: TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class StoredEntry:
    """One block as `Backend.scan` lists it.

    Attributes:
        nbytes: of its value, the frame.
        created_at, used_at: Unix seconds.
        parent, tokens, namespace, model, group: as in the `StoredBlock` that was saved, where the
            store keeps them.
    """

    key: BlockKey
    nbytes: int
    priority: int
    created_at: float
    used_at: float
    parent: BlockKey | None = None
    tokens: TokenArray | None = None
    namespace: bytes = b""
    model: bytes = b""
    group: int = 0


class Backend(ABC):
    """A store of immutable blocks under content-addressed keys.

    A key's value never changes, so `save` is idempotent and it does not matter which of two writers
    is last. All methods run on one event loop and may be called concurrently; none may block it
    (use ``asyncio.to_thread`` or aiofiles). A coroutine must not end while anything can still touch
    its buffers: the framework hands them on when it ends. It is never cancelled.

    A bounded store drops a chain from its end: using a block counts as using its ancestors.
    """

    device_buffers: ClassVar[bool] = False
    """True: `load` and `save` take blocks of the pool itself, unframed (peer to peer)."""

    enumerable: ClassVar[bool] = False
    """True: `children` and `scan` tell what is stored."""

    inline: ClassVar[bool] = False
    """True: loads run at memory speed: a request may wait for them in the step that needs them."""

    durable: ClassVar[bool] = False
    """True: what `save` reported stored is there after the process was killed and the store opened
    anew."""

    shared: ClassVar[bool] = False
    """True: several processes may have the store open at once and see each other's blocks."""

    expires: ClassVar[bool] = False
    """True: blocks older than a configured time are not found (``ttl=`` in its URL)."""

    max_value_bytes: ClassVar[int | None] = None
    """Longest value it takes, in bytes; ``None``: any that fits its capacity."""

    variable_length: ClassVar[bool] = False
    """True: `load` takes buffers longer than the value and fills their beginning, so that frames
    may be compressed. Else a value of another length than the buffer is a miss."""

    async def open(self, layouts: Sequence[KvCacheLayout]) -> None:
        """Connect or create; called once, before anything else, with one layout per pool group.

        Raises:
            ConfigurationError: the store cannot hold such blocks (capacity below one block, …).
            BackendUnavailable: it cannot be reached.
        """

    async def close(self) -> None:
        """Release everything; called once no call is in flight that this class still waits for.

        Returns also if the store is gone, and the second time.
        """

    @abstractmethod
    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """How many leading `keys` are present. Changes nothing but recency."""

    @abstractmethod
    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Fill ``into[i]`` with the value of ``keys[i]``; return how many leading ones were filled.

        `into` are 1-D uint8 host tensors, each exactly as long as the frame that was saved, or,
        with `variable_length`, possibly longer. An absent key, or a value of another length, ends
        the run: it is a miss, not an error. Buffers beyond the returned count are undefined, and
        all of them after an error.
        """

    @abstractmethod
    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Store `blocks`; return how many leading ones are now stored (already present counts).

        A key is stored wholly or not at all, also after an error or a crash at any moment.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Forget `keys`; absent ones are no error."""

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """The stored blocks, full ones and tails, whose parent is `key` (default: none known).

        Of more than `MAX_CHILDREN` those that were stored last: a short prompt that thousands share
        has as many, and a lookup must not take longer for it.
        """
        return ()

    def scan(self) -> AsyncIterator[StoredEntry]:
        """Everything that is stored, in no order; a snapshot is not promised (default: nothing)."""
        return _nothing()

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """What `scan` would list of each of `keys`; ``None``: absent, or not known (default).

        For what moves blocks between stores with all that is known of them. Does not count as use.
        """
        return [None] * len(keys)

    async def stats(self) -> Mapping[str, float]:
        """Numbers about the store; at least ``blocks`` and ``bytes`` where they are known."""
        return {}

    def register(self, region: Tensor) -> None:
        """`region` is host memory that buffers will come from; a store may pin or register it."""

    async def pin(self, keys: Sequence[BlockKey], ttl: float) -> int:
        """Keep `keys` from eviction for `ttl` seconds; return how many leading ones (default 0)."""
        return 0


async def _nothing() -> AsyncIterator[StoredEntry]:
    return
    yield  # makes this an iterator
