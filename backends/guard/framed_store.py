"""The layer between blocks and a store of frames: seals what is saved, checks what is loaded.

Belongs to an event loop, like the store. Applies no deadline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvconnect.backend import Backend, Capabilities, StoredBlock
from kvconnect.backends.guard.calls import Wanted, counted, mapped, together
from kvconnect.backends.guard.frames import Framing
from kvconnect.backends.guard.pieces import load_pieces, pieces
from kvconnect.errors import BackendUnavailable, BadFrame, Recompute, RetryLater
from kvconnect.frame import FrameChecksum
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.trace import Labels, count, warn_once

if TYPE_CHECKING:
    from torch import Tensor


class FramedStore:
    """The blocks of `inner`, whose values are frames.

    Attributes:
        framing: makes the frames.
        labels: the labels of its counters.
        damaged: the keys of the last frames that could not be used.
    """

    def __init__(self, inner: Backend, framing: Framing, name: str) -> None:
        self.framing = framing
        self.labels: Labels = ()
        self.damaged: deque[BlockKey] = deque(maxlen=256)
        self._inner = inner
        self._name = name

    def set_layouts(self, layouts: Sequence[KvCacheLayout]) -> None:
        """Sets the layouts of `framing`; see `Framing.set_layouts`."""
        lengths_vary = self._inner.capabilities.variable_length
        self.framing.set_layouts(layouts, variable_length=lengths_vary)

    async def load(
        self,
        keys: Sequence[BlockKey],
        into: Sequence[Tensor],
        wanted: Wanted,
        layout: KvCacheLayout | None = None,
    ) -> int:
        """Fills `into`; returns how many leading buffers are filled and sound.

        A frame that is damaged, or not of `layout`, is logged and counted. It is deleted if no
        reader can use it.
        """
        framing, can = self.framing, promised(self._inner)
        framing.verified = can.checks_frames
        rooms = framing.rooms(into, layout)
        taken = framing.checksums(rooms) if can.hashes_loads else ()

        async def fill(part: slice) -> int:
            some, frames = keys[part], rooms[part]
            filled = await load_counted(self._inner, some, frames, taken[part], self._name)
            if filled < len(some):
                await self._drop_misfit(some[filled], frames[filled].numel())
            return filled

        async def check(got: slice) -> int:
            wrong = await framing.open(keys[got], rooms[got], into[got], taken[got], layout)
            if wrong:
                await self._report({keys[got][index]: one for index, one in wrong.items()})
            return min(wrong, default=got.stop - got.start)

        return await load_pieces(into, fill, check, wanted=wanted)

    async def save(self, blocks: Sequence[StoredBlock], wanted: Wanted) -> int:
        """Seals and stores `blocks`; returns how many leading ones are stored."""
        if promised(self._inner).seals_saves and not self.framing.codecs:
            return await self._save_unsealed(blocks, wanted)
        saved = 0
        seal = self.framing.seal
        async with self.framing.scratch() as scratch:
            # A call that starts after its deadline has no waiting caller.
            parts = list(pieces([block.data for block in blocks])) if wanted() else []
            sealed = await seal(blocks[parts[0]] if parts else (), scratch, 0)
            for number, part in enumerate(parts):
                last = not wanted() or number + 1 == len(parts)
                if last:
                    stored = await self._store(sealed)
                else:
                    ahead = blocks[parts[number + 1]]
                    stored, sealed = await together(
                        self._store(sealed), seal(ahead, scratch, number + 1)
                    )
                saved += stored
                if stored < part.stop - part.start or last:
                    break
        return saved

    async def _save_unsealed(self, blocks: Sequence[StoredBlock], wanted: Wanted) -> int:
        saved = 0
        for part in pieces([block.data for block in blocks]):
            some = blocks[part]
            answer = await self._inner.save_sealed(some, self.framing.address(some))
            stored = counted(answer, len(some), self._name, "save")
            saved += stored
            if stored < len(some) or not wanted():
                break
        return saved

    async def _store(self, blocks: Sequence[StoredBlock]) -> int:
        return counted(await self._inner.save(blocks), len(blocks), self._name, "save")

    async def _drop_misfit(self, key: BlockKey, nbytes: int) -> None:
        """Deletes a block that is found but cannot be loaded, because its length is wrong.

        Such a block would be found for ever and never saved anew. In most cases the block is
        absent, or was saved after the load.
        """
        if self.framing.codecs.quantized is not None:
            return  # its length may be right for readers that do not quantize
        import torch

        try:
            with mapped(self._name, "lookup"):
                if not counted(await self._inner.lookup([key]), 1, self._name, "lookup"):
                    return
            with mapped(self._name, "load"):
                room = torch.empty(nbytes, dtype=torch.uint8)
                filled = await load_counted(self._inner, [key], [room], (), self._name)
        except RetryLater:
            return  # the blocks before it are valid
        if not filled:
            await self._report({key: BadFrame("of another length")})

    async def _report(self, wrong: Mapping[BlockKey, Recompute]) -> None:
        """Logs and counts frames that cannot be used; deletes those that no reader can use."""
        bad = [key for key, error in wrong.items() if isinstance(error, BadFrame)]
        self.damaged.extend(wrong)
        for key, error in wrong.items():
            drops = isinstance(error, BadFrame)
            kind = "bad_frame" if drops else "other_codec"
            fate = "bad ({}); it is dropped and computed" if drops else "of no use here ({})"
            count(f"store.{kind}", self.labels)
            warn_once(
                f"{self._name}.{kind}",
                f"{self._name}: block {key.hex()[:16]} is {fate.format(error)}",
            )
        if not bad:
            return
        try:
            with mapped(self._name, "delete"):
                await self._inner.delete(bad)
        except BackendUnavailable as failure:
            # The blocks before it are valid; these are checked again if they are loaded again.
            warn_once(f"{self._name}.drop", str(failure))


async def load_counted(
    inner: Backend,
    keys: Sequence[BlockKey],
    into: Sequence[Tensor],
    checksums: Sequence[FrameChecksum],
    name: str,
) -> int:
    """Loads from `inner`, which may take `checksums`; returns how many leading buffers it fills."""
    if not keys:
        return 0
    if checksums and promised(inner).hashes_loads:
        filled = await inner.load_hashed(keys, into, checksums)
    else:
        filled = await inner.load(keys, into)
    return counted(filled, len(keys), name, "load")


def promised(inner: Backend) -> Capabilities:
    """Returns the capabilities of `inner`, except those of a replaced `load` or `save`.

    A `load` or `save` that was set on the object itself, as by a test, lacks the class's
    capabilities.
    """
    can, own = inner.capabilities, vars(inner)
    if "load" in own:
        can = replace(can, checks_frames=False, hashes_loads=False)
    return replace(can, seals_saves=False) if "save" in own else can
