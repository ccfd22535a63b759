"""The interface of a store: four methods, and a few optional ones.

Backends are plain. They move opaque bytes under 32-byte keys and need no retries, no timeouts, no
checksums and no metrics of their own: the framework puts those around every backend, yours too
(`kvconnect.backends.registry.open_backend`).
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
"""The priority of blocks that were given none (TensorRT-LLM's default)."""

DEFAULT_PIN_FRACTION = 0.5
"""The share of a bounded store's capacity that pinned blocks may take, if none is configured."""

MAX_CHILDREN = 256
"""The most blocks that `Backend.children` lists."""

Access = Literal["store", "read", "maintain"]
"""The purpose of opening a store: to be a ``store``; to ``read``, which leaves no trace, not even
that blocks were used; or to ``maintain`` it, where only blocks deleted by name are removed."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlock:
    """A block to be stored. A plain store needs only `key` and `data`.

    Attributes:
        key: the key that the store finds it by.
        data: 1-D uint8 tensor on the host, one frame; the store reads it, never writes to it.
        parent: store key of the block before it; for the first of a prompt that of its namespace's
            root, which no block has. ``None``: not known.
        tokens: the block's own token ids; fewer than a whole block's for a tail.
        priority: retention priority, 0 (evicted first) to 100.
        namespace: digest of salt and adapter, then one of the salt, for pruning; see
            `kvconnect.keys.Namespace.tag`.
        model: of the model and its cache geometry, for pruning; see `kvconnect.keys.model_tag`.
        group: pool group.
        ttl_s: seconds after which the block is not wanted any more; ``None``: no such time. Only a
            store with the capability ``expires_each`` has to look at it.
    """

    key: BlockKey
    data: Tensor
    parent: BlockKey | None = None
    tokens: TokenArray | None = None
    priority: int = DEFAULT_RETENTION_PRIORITY
    namespace: bytes = b""
    model: bytes = b""
    group: int = 0
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """A stored block that follows another one: its store key and its own tokens."""

    key: BlockKey
    tokens: TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class StoredEntry:
    """A stored block as `Backend.scan` lists it.

    Attributes:
        nbytes: of its value, the frame.
        created_at, used_at: Unix seconds.
        parent, tokens, namespace, model, group: as in the `StoredBlock` that was saved, where the
            store keeps them.
        pinned_until: Unix seconds until which the block is pinned; 0: it is not, ``inf``: until it
            is unpinned.
        hits: how often the block was loaded since it was saved; ``None``: the store does not count.
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
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of a store. The defaults are those of a store with four methods.

    Attributes:
        enumerable: `children` and `scan` list the stored blocks.
        inline: loads run at memory speed.
        durable: blocks that `save` reported as stored are there after the process was killed and
            the store opened anew.
        shared: several processes may have the store open at once and see each other's blocks.
        pins: `pin` keeps blocks from being dropped.
        expires: blocks older than a configured time are not found (``ttl=`` in its URL).
        expires_each: a block is not found longer than its own ``ttl_s`` after it was saved. One
            that is there already keeps its time.
        max_value_bytes: longest value it takes, in bytes; ``None``: any that fits its capacity.
        variable_length: `load` takes buffers longer than the value and fills their beginning, so
            that frames may be compressed. Else a value of another length than the buffer is a miss.
        checks_frames: every frame that `load` calls filled is one of its key, its checksum right.
        hashes_loads: `load_hashed` takes checksums while the bytes are in the processor's cache.
        seals_saves: `save_sealed` seals the frames while it reads them anyway.
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
        """Returns the capabilities of a backend around such a store, which may damage frames."""
        return replace(self, checks_frames=False, hashes_loads=False, seals_saves=False)


class Backend(ABC):
    """A store of immutable blocks under content-addressed keys.

    A key's value never changes, so `save` is idempotent and it does not matter which of two writers
    is last. All methods run on one event loop and may be called concurrently; none may block it
    (use ``asyncio.to_thread`` or aiofiles). A coroutine must not end while anything can still touch
    its buffers: the framework reuses them when it ends. It is never cancelled.

    A bounded store evicts a chain from its end: using a block counts as using its ancestors.

    Attributes:
        capabilities: of the class. An object whose settings decide replaces them with
            ``dataclasses.replace``. If a class overrides the `load` of a store, but not its
            `load_hashed`, the framework calls only `load`, and drops the capabilities that
            described `load_hashed`. The same holds of `save` and `save_sealed`.
        deadline_s: the framework's deadline for each call, in seconds; set before `open`.
    """

    capabilities: Capabilities = Capabilities()
    deadline_s: float = inf

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        _see_all_calls(cls, "load", "load_hashed", "checks_frames", "hashes_loads")
        _see_all_calls(cls, "save", "save_sealed", "seals_saves")

    async def open(self, layouts: Sequence[KvCacheLayout], access: Access = "store") -> None:
        """Connects or creates; called once, before anything else, with one layout per pool group.

        Raises:
            ConfigurationError: the store cannot hold such blocks (capacity below one block, …).
            BackendUnavailable: it cannot be reached.
        """

    async def close(self) -> None:
        """Releases everything; called once no call is in flight that this class still waits for.

        It also returns if the store is gone, and when it is called again.
        """

    @abstractmethod
    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading `keys` are present. Changes nothing but recency."""

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
        """Loads like `load`, the default, and reports the bytes in each buffer to its checksum.

        The store verifies nothing with `checksums`: the caller compares them.
        """
        return await self.load(keys, into)

    async def save_sealed(
        self, blocks: Sequence[StoredBlock], checksums: Sequence[FrameChecksum]
    ) -> int:
        """Saves frames like `save`; their `checksums` have yet to seal them (`frame.address`).

        Frames that are not stored may be left unsealed. The default seals all of them, and saves.
        """
        for checksum in checksums:
            checksum.seal()
        return await self.save(blocks)

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """Returns the stored blocks, full ones and tails, whose parent is `key` (default: none).

        If there are more than `MAX_CHILDREN`, it returns those that were stored last. A short
        prompt that thousands of prompts share has as many, and a lookup must not take longer for
        it.
        """
        return ()

    def scan(self) -> AsyncIterator[StoredEntry]:
        """Yields all stored entries, in no order and not as a snapshot (default: none)."""
        return _nothing()

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """Returns what `scan` would list for each of `keys`; ``None``: absent or unknown (default).

        It serves moving blocks between stores with all their fields. It does not count as use.
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
            until: Unix seconds at which the pins end, in place of an earlier pin's; ``inf``: when
                they are unpinned; ``None``: now, and `keys` are no longer pinned.

        Returns:
            For each of `keys` whether it is pinned now; with ``None``, whether it was.

        Raises:
            ConfigurationError: this store has no pins (default).
        """
        raise ConfigurationError(
            f"{type(self).__name__}: this store cannot pin blocks; disk, memory and Redis stores "
            "can"
        )

    async def scrub(self) -> bool:
        """Removes some of what deleted and dropped blocks left behind; no stored block changes.

        It is called after `delete`, again and again until it returns ``False``: after that no byte
        of a block that is not stored is in the medium, as far as the store can reach it.

        Returns:
            Whether there may be more (default: ``False``, `delete` leaves nothing behind).
        """
        return False

    async def stats(self) -> Mapping[str, float]:
        """Returns numbers about the store: at least ``blocks`` and ``bytes`` where known.

        With the capability ``pins`` also ``pinned_blocks`` and ``pinned_bytes``.
        """
        return {}

    def parts(self) -> Mapping[str, Backend]:
        """Returns by name the stores that hold its frames and answer; none: it holds them."""
        return {}

    def register(self, region: Tensor) -> None:
        """Announces host memory that buffers will come from; a store may pin or register it."""


async def _nothing() -> AsyncIterator[StoredEntry]:
    return
    yield  # makes this an iterator


def _see_all_calls(cls: type[Backend], plain: str, special: str, *lost: str) -> None:
    """Drops the capabilities `lost` of `cls` if its `plain` method is newer than its `special` one.

    `special` then no longer stands for `plain`.
    """
    plains = [at for at, kind in enumerate(cls.__mro__) if plain in vars(kind)]
    specials = [at for at, kind in enumerate(cls.__mro__) if special in vars(kind)]
    # The last of both is `Backend`. Where no subclass has a `special`, the first `plain` counts.
    meant = specials[0] if len(specials) > 1 else plains[-2:][0]
    if plains[0] < meant:
        cls.capabilities = replace(cls.capabilities, **dict.fromkeys(lost, False))
