"""The framing that seals frames to save and opens loaded ones, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvconnect import frame
from kvconnect.backend import Child, StoredBlock
from kvconnect.backends.guard.calls import together
from kvconnect.backends.guard.codecs import Codecs
from kvconnect.backends.lanes import Lane
from kvconnect.errors import BackendUnavailable, BadFrame, ConfigurationError, OtherCodec, Recompute
from kvconnect.frame import ALIGNMENT, FrameChecksum, FrameHeader, frame_nbytes
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

# Hashing less than this takes less time than handing it to a thread; codecs are slower.
_INLINE_NBYTES = 256 << 10
_INLINE_CODED_NBYTES = 32 << 10
_THREADS = 2


class _Known(NamedTuple):
    """A layout with the values that are derived from it, computed once instead of per block."""

    layout: KvCacheLayout
    fingerprint: bytes
    block_nbytes: int
    frame_nbytes: int

    @classmethod
    def of(cls, layout: KvCacheLayout) -> _Known:
        nbytes = layout.block_nbytes
        return cls(layout, layout.fingerprint(), nbytes, frame_nbytes(nbytes))


class Framing:
    """The frames of one store: headers, checksums and codecs. Belongs to one event loop.

    Args:
        name: the store's name, for messages.
        codecs: the codecs of payloads.
        verify: true to check every frame that is opened.

    Attributes:
        verified: true if the store has checked its frames, so that only headers are checked here.
    """

    def __init__(self, name: str, codecs: Codecs, *, verify: bool) -> None:
        self.name = name
        self.codecs = codecs
        self.verified = False
        self._verify = verify
        self._known: tuple[_Known, ...] = ()
        self._by_fingerprint: dict[bytes, _Known] = {}
        self._cut: dict[int, int] = {}
        self._scratch = Scratch()
        self._lane: Lane | None = None
        self._closed = False

    def set_layouts(self, layouts: Sequence[KvCacheLayout], *, variable_length: bool) -> None:
        """Sets the layouts of the frames to open and seal; without any, all frames can be opened.

        Raises:
            ConfigurationError: the codec cannot encode one of them, or makes lengths vary in a
                store that requires fixed lengths.
        """
        cut: dict[int, int] = {}
        for layout in layouts:
            whole = frame_nbytes(layout.block_nbytes)
            encoded = frame_nbytes(self.codecs.most_nbytes(layout))
            if cut.setdefault(whole, encoded) != encoded and not variable_length:
                raise ConfigurationError(
                    f"codec={self.codecs}: {self.name} loads values of known length only, and "
                    "pools whose blocks are equally long differ in length once encoded"
                )
            cut[whole] = max(cut[whole], encoded)
        self._known = tuple(map(_Known.of, layouts))
        self._by_fingerprint = {one.fingerprint: one for one in self._known}
        self._cut = cut

    def close(self) -> None:
        """Ends the threads; work that has not begun is cancelled."""
        self._closed = True
        if self._lane is not None:
            self._lane.end()
        self._scratch.clear()

    # ------------------------------------------------------------------ to the store

    @asynccontextmanager
    async def scratch(self) -> AsyncIterator[ScratchPair | None]:
        """Yields memory for the encoded frames of one save, or ``None``; waits for its turn."""
        if not self.codecs:
            yield None
            return
        async with self._scratch.pair() as pair:
            yield pair

    async def seal(
        self, blocks: Sequence[StoredBlock], scratch: ScratchPair | None, number: int
    ) -> list[StoredBlock]:
        """Returns `blocks` ready to store: sealed in place, or encoded in memory of `scratch`.

        Args:
            blocks: with the frame of a payload as `data`.
            scratch: for what is encoded; ``None`` if nothing is.
            number: the number of the piece; it uses the memory of the piece before the last one.
        """
        nbytes = sum(block.data.numel() for block in blocks)
        if scratch is None:
            return await self._on_thread(lambda: [self._seal(one, None) for one in blocks], nbytes)
        memory = scratch.room(number, nbytes)
        rooms = list(_split(memory, [block.data.numel() for block in blocks]))

        def sealed(part: slice) -> Callable[[], list[StoredBlock]]:
            pairs = zip(blocks[part], rooms[part], strict=True)
            return lambda: [self._seal(block, room) for block, room in pairs]

        return await self._halves(sealed, len(blocks), nbytes)

    def address(self, blocks: Sequence[StoredBlock]) -> list[FrameChecksum]:
        """Writes the frames of `blocks` in place without checksums, which the store computes."""
        return [frame.address(block.data, _header(block, self._of(block))) for block in blocks]

    def _seal(self, block: StoredBlock, scratch: Tensor | None) -> StoredBlock:
        known = self._of(block)
        header = _header(block, known)
        coded = None
        if scratch is not None:
            payload = frame.payload(block.data, known.block_nbytes)
            coded = self.codecs.encode(payload, header, known.layout, scratch)
        if coded is None:
            frame.seal(block.data, header)
            return block
        cipher = self.codecs.cipher
        if cipher is None or block.tokens is None:
            return replace(block, data=coded)
        secret = cipher.encrypt_tokens(block.tokens, block.key, block.parent)
        return replace(block, data=coded, tokens=secret)

    def _of(self, block: StoredBlock) -> _Known:
        if not 0 <= block.group < len(self._known):
            raise ConfigurationError(
                f"group={block.group}: {self.name} was opened with {len(self._known)} layouts"
            )
        known = self._known[block.group]
        if block.data.numel() != known.frame_nbytes:
            raise ConfigurationError(
                f"frame: {block.data.numel()} bytes, {known.frame_nbytes} are needed"
            )
        return known

    # ------------------------------------------------------------------ from the store

    def rooms(
        self, into: Sequence[Tensor], layout: KvCacheLayout | None = None
    ) -> Sequence[Tensor]:
        """Returns the leading part of each of `into` that holds an encoded frame, of any layout.

        With `layout` the part only holds encoded frames of that layout.
        """
        if self.codecs.quantized is None:
            return into
        if layout is not None:
            most = frame_nbytes(self.codecs.most_nbytes(layout))
            return [buffer[:most] for buffer in into]
        return [buffer[: self._cut.get(buffer.numel(), buffer.numel())] for buffer in into]

    def checksums(self, frames: Sequence[Tensor]) -> list[FrameChecksum]:
        """Returns checksums that a store computes as it fills `frames`; none without `verify`."""
        return [FrameChecksum(data) for data in frames] if self._verify else []

    async def open(
        self,
        keys: Sequence[BlockKey],
        frames: Sequence[Tensor],
        into: Sequence[Tensor],
        taken: Sequence[FrameChecksum] = (),
        layout: KvCacheLayout | None = None,
    ) -> dict[int, Recompute]:
        """Checks `frames`, which lie at the beginning of `into`, and decodes encoded ones.

        All are checked, also those behind a damaged one, which do not count as loaded: the caller
        deletes every damaged frame from the store, so that the next save replaces it.

        Args:
            keys: the keys of the blocks.
            frames: the frames that the store filled.
            into: receives the payloads.
            taken: the checksums, if the store computed them during the load.
            layout: the layout of all of them; by default one of those of `set_layouts`.

        Returns:
            The errors by index.
        """
        checksums: Sequence[FrameChecksum | None] = taken or [None] * len(keys)
        layouts = self._by_fingerprint
        if layout is not None:
            layouts = {(one := _Known.of(layout)).fingerprint: one}

        def opened(part: slice) -> Callable[[], list[Recompute | None]]:
            def work() -> list[Recompute | None]:
                faults: list[Recompute | None] = []
                four = zip(keys[part], frames[part], into[part], checksums[part], strict=True)
                for one in four:
                    try:
                        self._open(*one, layouts)
                    except (BadFrame, OtherCodec) as error:
                        faults.append(error)
                    else:
                        faults.append(None)
                return faults

            return work

        nbytes = sum(map(self._work_nbytes, frames, checksums))
        faults = await self._halves(opened, len(keys), nbytes)
        return {index: fault for index, fault in enumerate(faults) if fault is not None}

    def _open(
        self,
        key: BlockKey,
        data: Tensor,
        into: Tensor,
        taken: FrameChecksum | None,
        layouts: Mapping[bytes, _Known],
    ) -> None:
        if not self._verify and not self.codecs and not frame.is_encoded(data):
            return
        sealed = frame.whole(data) if taken is None or taken.encoded else data
        if self.verified:
            header = frame.check_header(sealed, key, layouts or None)
        else:
            header = frame.check(sealed, key, layouts or None, taken)
        flags = self.codecs.check_flags(header)
        known = layouts.get(header.fingerprint)
        if known is None:
            if flags:
                raise OtherCodec("encoded, and its layout is not known here")
            return
        if known.frame_nbytes != into.numel():
            raise BadFrame(f"of a layout of {known.block_nbytes} bytes, not of {into.numel()}")
        if flags:
            payload = frame.payload(into, known.block_nbytes)
            self.codecs.decode(sealed, header, payload, known.layout)
        elif header.payload_nbytes != known.block_nbytes:
            raise BadFrame(f"{header.payload_nbytes} bytes, the layout has {known.block_nbytes}")

    def children(self, parent: BlockKey | None, found: Sequence[Child]) -> Sequence[Child]:
        """Returns `found`, the store's children of `parent`, with their tokens decrypted.

        Children whose tokens cannot be decrypted are left out.
        """
        cipher = self.codecs.cipher
        if cipher is None:
            return found
        tokens = [cipher.decrypt_tokens(child.tokens, child.key, parent) for child in found]
        return [
            Child(child.key, plain)
            for child, plain in zip(found, tokens, strict=True)
            if plain is not None
        ]

    # ------------------------------------------------------------------ threads

    async def _halves(
        self, work: Callable[[slice], Callable[[], list[T]]], count: int, nbytes: int
    ) -> list[T]:
        """Runs ``work(slice)()`` over `count` items, on two threads if codecs make it slow."""
        if not self.codecs or count < _THREADS:
            return await self._on_thread(work(slice(0, count)), nbytes)
        middle = count // 2
        first, second = await together(
            self._on_thread(work(slice(0, middle)), nbytes),
            self._on_thread(work(slice(middle, count)), nbytes),
        )
        return first + second

    def _work_nbytes(self, data: Tensor, taken: FrameChecksum | None) -> int:
        """Returns how many bytes of a frame must be read to open it."""
        if self.codecs or not (self.verified or taken):
            return data.numel()
        return taken.left_nbytes if taken else 0

    async def _on_thread(self, work: Callable[[], T], nbytes: int) -> T:
        if nbytes <= (_INLINE_CODED_NBYTES if self.codecs else _INLINE_NBYTES):
            return work()
        if self._closed:
            raise BackendUnavailable(f"{self.name}: is closed")
        if self._lane is None:  # many stores never need it
            self._lane = Lane("kvconnect-frames", _THREADS)
        return await self._lane.run(work)


def _header(block: StoredBlock, known: _Known) -> FrameHeader:
    tokens = known.layout.tokens_per_block if block.tokens is None else len(block.tokens)
    return FrameHeader(tokens, known.block_nbytes, known.fingerprint, block.key)


def _split(memory: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    start = 0
    for size in sizes:
        yield memory[start : start + size]
        start += size


_PAIRS = 2


class ScratchPair:
    """A pair of buffers: one is filled while the other is written to the store."""

    def __init__(self) -> None:
        import torch

        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]

    def room(self, number: int, nbytes: int) -> Tensor:
        """Returns `nbytes`, page-aligned, in the memory of the piece before the last one."""
        import torch

        memory = self._memory[number % 2]
        if memory.numel() < nbytes + ALIGNMENT:
            self._memory[number % 2] = memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
        offset = -memory.data_ptr() % ALIGNMENT
        return memory[offset : offset + nbytes]


class Scratch:
    """The pairs of a store: at most two savers have one at a time; others wait for their turn.

    So there are at most four buffers, even if the store hangs: a save that does not end keeps its
    pair. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(_PAIRS)
        self._idle: list[ScratchPair] = []

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[ScratchPair]:
        """Yields a pair for the time of one save; waits for its turn."""
        async with self._turns:
            pair = self._idle.pop() if self._idle else ScratchPair()
            try:
                yield pair
            finally:
                self._idle.append(pair)

    def clear(self) -> None:
        """Frees the memory that is not used."""
        self._idle.clear()
