"""The interface of a store: four methods, and a few optional ones.

Backends are plain. They move opaque bytes under 32-byte keys and need no retries, no timeouts, no
checksums and no metrics of their own: `kvconnect.backends.registry.open_backend` adds those to
every backend, also to one of your own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, Literal

from kvconnect.errors import ConfigurationError
from kvconnect.frame import FrameChecksum
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.tokens import TokenArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DEFAULT_PIN_FRACTION",
    "DEFAULT_RETENTION_PRIORITY",
    "MAX_CHILDREN",
    "Access",
    "Backend",
    "Capabilities",
    "Child",
    "StoredBlock",
    "StoredEntry",
]

DEFAULT_RETENTION_PRIORITY = 35
"""The priority of blocks that were saved without one (TensorRT-LLM's default)."""

DEFAULT_PIN_FRACTION = 0.5
"""The default share of a bounded store's capacity that pinned blocks may take."""

MAX_CHILDREN = 256
"""The most blocks that `Backend.children` lists."""

Access = Literal["store", "read", "maintain"]
"""The purpose of opening a store. ``store``: saves and loads blocks.

``read``: changes nothing, not even when blocks were last used. ``maintain``: removes only blocks
that are deleted by key."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlock:
    """A block to be stored. A plain store needs only `key` and `data`.

    Attributes:
        key: the block's store key.
        data: 1-D uint8 tensor on the host, one frame; the store reads it, never writes to it.
        parent: store key of the block before this one. The first block of a prompt has the key of
            its namespace's root, which is no block's. ``None``: not known.
        tokens: the block's own token ids; fewer than a whole block's for a tail.
        priority: retention priority, 0 (evicted first) to 100.
        namespace: digest of salt and adapter, followed by a digest of the salt, for pruning; see
            `kvconnect.keys.Namespace.tag`.
        model: of the model and its cache geometry, for pruning; see `kvconnect.keys.model_tag`.
        group: pool group.
        expires_at: Unix seconds from which on the block is not wanted any more; ``None``: no such
            time. Only a store with the capability ``expires_each`` has to obey it.
    """

    key: BlockKey
    data: Tensor
    parent: BlockKey | None = None
    tokens: TokenArray | None = None
    priority: int = DEFAULT_RETENTION_PRIORITY
    namespace: bytes = b""
    model: bytes = b""
    group: int = 0
    expires_at: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """A stored block that follows another one: its store key and its own tokens."""

    key: BlockKey
    tokens: TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class StoredEntry:
    """A stored block as `Backend.scan` lists it.

    Attributes:
        nbytes: bytes of the stored frame.
        created_at, used_at: Unix seconds of the save and of the last use.
        parent, tokens, namespace, model, group: the fields of the saved `StoredBlock`; defaults if
            the store does not keep them.
        pinned_until: Unix seconds at which the pin ends; 0: not pinned, ``inf``: pinned until
            `unpin`.
        hits: loads of the block since it was saved; ``None``: the store does not count them.
        expires_at: of the saved `StoredBlock`. The store's own time to live does not count.
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
    pinned_until: float = 0.0
    hits: int | None = None
    expires_at: float | None = None

    def block(self, data: Tensor) -> StoredBlock:
        """Makes a `StoredBlock` of this entry and `data`, for saving it to another store."""
        return StoredBlock(
            key=self.key,
            data=data,
            parent=self.parent,
            tokens=self.tokens,
            priority=self.priority,
            namespace=self.namespace,
            model=self.model,
            group=self.group,
            expires_at=self.expires_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of a store. The defaults are those of a store with four methods.

    Attributes:
        enumerable: `children` and `scan` list the stored blocks.
        inline: loads take no longer than a copy in memory.
        durable: blocks that `save` reported as stored survive the death of the process.
        shared: several processes may open the store at once and see each other's blocks.
        pins: `pin` keeps blocks from being dropped.
        expires: blocks older than a configured time are not found (``ttl=`` in its URL).
        expires_each: a block is not found from its own ``expires_at`` on, unless it is pinned. One
            that is there already keeps its time.
        max_value_bytes: longest value it takes, in bytes; ``None``: any that fits its capacity.
        variable_length: `load` takes buffers longer than the value and fills their beginning, so
            that frames may be compressed. Without it, a value whose length differs from the
            buffer's is a miss.
        checks_frames: the store verifies key and checksum of every frame that `load` counts as
            filled.
        hashes_loads: `load_hashed` hashes bytes while they are in the processor's cache.
        seals_saves: `save_sealed` seals frames in the pass in which it reads them.
    """

    enumerable: bool = False
    inline: bool = False
    durable: bool = False
    shared: bool = False
    expires: bool = False
    expires_each: bool = False
    pins: bool = False
    max_value_bytes: int | None = None
    variable_length: bool = False
    checks_frames: bool = False
    hashes_loads: bool = False
    seals_saves: bool = False

    def wrapped(self) -> Capabilities:
        """Returns the capabilities of a backend that wraps such a store and may damage frames."""
        return replace(self, checks_frames=False, hashes_loads=False, seals_saves=False)


class Backend(ABC):
    """A store of immutable blocks under content-addressed keys.

    A key's value never changes, so `save` is idempotent and it does not matter which of two writers
    is last. All methods run on one event loop and may be called concurrently; none may block it
    (use ``asyncio.to_thread`` or aiofiles). A coroutine must not end while anything can still touch
    its buffers: the framework reuses the buffers then. The framework never cancels a coroutine.

    A bounded store evicts a chain from its end: using a block counts as using its ancestors.

    Attributes:
        capabilities: the class's capabilities. An object whose settings decide overrides them with
            ``dataclasses.replace``. If a subclass overrides `load` but not `load_hashed`, the
            framework calls only `load`, and drops the capabilities that describe `load_hashed`. The
            same holds for `save` and `save_sealed`.
        deadline_s: the framework's deadline for each call, in seconds; set before `open`.
    """

    capabilities: Capabilities = Capabilities()
    deadline_s: float = inf

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        _see_all_calls(cls, "load", "load_hashed", "checks_frames", "hashes_loads")
        _see_all_calls(cls, "save", "save_sealed", "seals_saves")

    async def open(self, layouts: Sequence[KvCacheLayout], access: Access = "store") -> None:
        """Connects to the store or creates it; called once, first, with one layout per pool group.

        Raises:
            ConfigurationError: the store cannot hold such blocks (capacity below one block, …).
            BackendUnavailable: the store cannot be reached.
        """

    async def close(self) -> None:
        """Releases all resources; called when no other call is in flight.

        Returns also if the store is gone. A second call does nothing.
        """

    @abstractmethod
    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading `keys` are present, and marks those as used."""

    @abstractmethod
    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Fills ``into[i]`` with the value of ``keys[i]``; returns how many leading ones it filled.

        `into` are 1-D uint8 host tensors, each exactly as long as the frame that was saved, or,
        with `variable_length`, possibly longer. An absent key, or a value of another length, ends
        the run: it is a miss, not an error. Buffers beyond the returned count are undefined, and
        all of them after an error.
        """

    @abstractmethod
    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Stores `blocks`; returns how many leading ones are now stored (already present counts).

        A key is stored wholly or not at all, also after an error or a crash at any moment.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Deletes `keys`; absent ones are no error."""

    async def load_hashed(
        self, keys: Sequence[BlockKey], into: Sequence[Tensor], checksums: Sequence[FrameChecksum]
    ) -> int:
        """Loads like `load`, and reports the bytes in each buffer to its checksum.

        The default calls `load`. The store does not verify `checksums`: the caller compares them.
        """
        return await self.load(keys, into)

    async def save_sealed(
        self, blocks: Sequence[StoredBlock], checksums: Sequence[FrameChecksum]
    ) -> int:
        """Saves frames like `save`, after sealing each with its checksum (see `frame.address`).

        Frames that are not stored may stay unsealed. The default seals all frames, then calls
        `save`.
        """
        for checksum in checksums:
            checksum.seal()
        return await self.save(blocks)

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """Returns the stored blocks, full ones and tails, whose parent is `key` (default: none).

        If there are more than `MAX_CHILDREN`, it returns those stored last: a short beginning that
        thousands of prompts share must not make a lookup slow.
        """
        return ()

    def scan(self) -> AsyncIterator[StoredEntry]:
        """Yields all stored entries, in no order and not as a snapshot (default: none)."""
        return _nothing()

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """Returns what `scan` would list for each key; ``None``: absent or unknown (default).

        Tools use it to copy blocks between stores with all fields. It does not count as use.
        """
        return [None] * len(keys)

    async def pin(self, keys: Sequence[BlockKey], until: float | None) -> Sequence[bool]:
        """Pins `keys`: the store drops them neither for room nor for their age.

        The blocks of all pins together take no more than a share of the capacity. `keys` are pinned
        in their order, until the share is used up; an absent key takes none of it. `delete` deletes
        pinned blocks, too. A durable store keeps pins when it is closed, and when the process is
        killed.

        Args:
            keys: parents before children.
            until: Unix seconds at which the pins end; replaces the end of an earlier pin. ``inf``:
                the pins last until they are removed. ``None``: removes the pins.

        Returns:
            For each key, true if it is pinned now. With ``None``: true if it was pinned before.

        Raises:
            ConfigurationError: this store has no pins (default).
        """
        raise ConfigurationError(
            f"{type(self).__name__}: this store cannot pin blocks; disk, memory and Redis stores "
            "can"
        )

    async def scrub(self) -> bool:
        """Overwrites some of the bytes that deleted blocks left; no stored block changes.

        The framework calls it after `delete`, repeatedly, until it returns ``False``. Then the
        medium holds no byte of a block that is not stored, as far as the store can reach it.

        Returns:
            True if more may be left (default: ``False``, because `delete` leaves nothing).
        """
        return False

    async def stats(self) -> Mapping[str, float]:
        """Returns statistics of the store, at least ``blocks`` and ``bytes`` if it knows them.

        With the capability ``pins`` they include ``pinned_blocks`` and ``pinned_bytes``.
        """
        return {}

    def parts(self) -> Mapping[str, Backend]:
        """Returns by name the inner stores that hold the frames; empty: this store holds them."""
        return {}

    def register(self, region: Tensor) -> None:
        """Announces host memory that buffers will come from; a store may pin or register it."""


async def _nothing() -> AsyncIterator[StoredEntry]:
    return
    yield  # makes this function an iterator


def _see_all_calls(cls: type[Backend], plain: str, special: str, *lost: str) -> None:
    """Drops capabilities of a class that overrides its `plain` method, but not its `special` one.

    `special` would then skip the override.
    """
    plains = [at for at, kind in enumerate(cls.__mro__) if plain in vars(kind)]
    specials = [at for at, kind in enumerate(cls.__mro__) if special in vars(kind)]
    # Both searches end at `Backend` at the latest. If no subclass defines `special`, the first
    # `plain` counts.
    meant = specials[0] if len(specials) > 1 else plains[-2:][0]
    if plains[0] < meant:
        cls.capabilities = replace(cls.capabilities, **dict.fromkeys(lost, False))
