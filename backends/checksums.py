"""What stores of ours may do about checksums themselves, so that no pass of its own is needed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from kvconnect.backend import Backend, StoredBlock
from kvconnect.frame import FrameChecksum
from kvconnect.keys import BlockKey

__all__ = ["ChecksFrames", "HashesLoads", "SealsSaves"]


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
