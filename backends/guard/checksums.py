"""What stores of ours may do about checksums themselves, so that no pass of its own is needed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cache

from torch import Tensor

from kvconnect.backend import Backend, StoredBlock
from kvconnect.frame import FrameChecksum
from kvconnect.keys import BlockKey

__all__ = [
    "ChecksFrames",
    "HashesLoads",
    "SealsSaves",
    "checks_frames",
    "hashes_loads",
    "seals_saves",
]


class ChecksFrames(Backend):
    """A backend that verifies what it loads, so that nobody has to do it again.

    Not a capability that a wrapper could pass on: what is put around such a backend may damage what
    came out of it.
    """

    @property
    @abstractmethod
    def checks_frames(self) -> bool:
        """Whether every frame that `load` calls filled is one of its key, its checksum right."""


class HashesLoads(Backend):
    """A backend that takes the checksums of what it loads while the bytes are in the cache.

    It verifies nothing: whoever asked compares.
    """

    @abstractmethod
    async def load_hashed(
        self, keys: Sequence[BlockKey], into: Sequence[Tensor], checksums: Sequence[FrameChecksum]
    ) -> int:
        """As `load`; each of `checksums` is told what arrives in its buffer of `into`, or not."""


class SealsSaves(Backend):
    """A backend that seals what it saves while it reads it anyway."""

    @abstractmethod
    async def save_sealed(
        self, blocks: Sequence[StoredBlock], checksums: Sequence[FrameChecksum]
    ) -> int:
        """As `save`, of frames that their `checksums` have yet to seal (`frame.address`).

        Frames that are not stored may be left without one.
        """


def checks_frames(backend: Backend) -> bool:
    """Whether what `backend` loads was verified by it."""
    return (
        isinstance(backend, ChecksFrames)
        and _takes_place(backend, "load", "checks_frames")
        and backend.checks_frames
    )


def hashes_loads(backend: Backend) -> HashesLoads | None:
    """`backend`, if its loads are to go through `load_hashed`."""
    if isinstance(backend, HashesLoads) and _takes_place(backend, "load", "load_hashed"):
        return backend
    return None


def seals_saves(backend: Backend) -> SealsSaves | None:
    """`backend`, if its saves are to go through `save_sealed`."""
    if isinstance(backend, SealsSaves) and _takes_place(backend, "save", "save_sealed"):
        return backend
    return None


def _takes_place(backend: Backend, plain: str, special: str) -> bool:
    # Who derives from a store of ours and overrides `load` or `save` wants to see all calls.
    return plain not in vars(backend) and _of_one_class(type(backend), plain, special)


@cache
def _of_one_class(kind: type[Backend], plain: str, special: str) -> bool:
    owner = next(cls for cls in kind.__mro__ if plain in vars(cls))
    return any(special in vars(cls) for cls in kind.__mro__[: kind.__mro__.index(owner) + 1])
