"""The lossless codecs zstd and lz4, which compress one block at a time within bounds."""

from __future__ import annotations

import threading

from kvconnect.errors import BadFrame, MissingExtra

__all__ = ["Lz4", "Zstd"]

_EXTRA = "codecs"


class Zstd:
    """The zstd codec at level 1: higher levels hardly shrink KV more, and are slower than disks.

    Thread-safe.

    Raises:
        MissingExtra: zstandard is not installed.
    """

    _LEVEL = 1

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise MissingExtra("codec=zstd", _EXTRA) from error
        self._zstandard = zstandard
        self._of_thread = threading.local()  # its objects serve one thread at a time

    def compress(self, data: memoryview) -> bytes:
        """Returns `data` compressed, which need not be smaller."""
        own = self._of_thread
        if not hasattr(own, "compressor"):
            own.compressor = self._zstandard.ZstdCompressor(level=self._LEVEL)
        packed: bytes = own.compressor.compress(data)
        return packed

    def decompress(self, data: memoryview, nbytes: int) -> bytes:
        """Returns the `nbytes` bytes that `data` was made of; never allocates more than that.

        Raises:
            BadFrame: `data` was made of another number of bytes, or is damaged.
        """
        own = self._of_thread
        if not hasattr(own, "decompressor"):
            own.decompressor = self._zstandard.ZstdDecompressor()
        try:
            # It would allocate the length that the data claims.
            says = self._zstandard.get_frame_parameters(data).content_size
            if says != nbytes:
                raise BadFrame(f"zstd: says it becomes {says} bytes, not {nbytes}")
            plain: bytes = own.decompressor.decompress(data, nbytes, allow_extra_data=False)
        except (self._zstandard.ZstdError, MemoryError) as error:
            raise BadFrame(f"zstd: {error}") from error
        return _exactly(plain, nbytes, "zstd")


class Lz4:
    """The lz4 block format without a length: faster than zstd; the result is hardly smaller.

    Thread-safe.

    Raises:
        MissingExtra: lz4 is not installed.
    """

    def __init__(self) -> None:
        try:
            import lz4.block  # type: ignore[import-untyped]
        except ImportError as error:
            raise MissingExtra("codec=lz4", _EXTRA) from error
        self._lz4 = lz4.block

    def compress(self, data: memoryview) -> bytes:
        """Returns `data` compressed, which need not be smaller."""
        packed: bytes = self._lz4.compress(data, store_size=False)
        return packed

    def decompress(self, data: memoryview, nbytes: int) -> bytes:
        """Returns the `nbytes` bytes that `data` was made of, like `Zstd.decompress`."""
        try:
            plain: bytes = self._lz4.decompress(data, uncompressed_size=nbytes)
        except (self._lz4.LZ4BlockError, MemoryError) as error:
            raise BadFrame(f"lz4: {error}") from error
        return _exactly(plain, nbytes, "lz4")


def _exactly(plain: bytes, nbytes: int, name: str) -> bytes:
    if len(plain) != nbytes:
        raise BadFrame(f"{name}: became {len(plain)} bytes, not {nbytes}")
    return plain
