"""The codecs between a frame and its payload: rounding, compression, encryption, in this order."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import IntFlag
from functools import cache
from typing import TYPE_CHECKING, Literal, Self

from kvconnect import frame
from kvconnect.backends.guard.encryption import Cipher
from kvconnect.errors import BadFrame, ConfigurationError, MissingExtra, OtherCodec, nearest
from kvconnect.frame import FrameHeader, frame_nbytes
from kvconnect.layout import KvCacheLayout

if TYPE_CHECKING:
    from torch import Tensor


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


class CodecFlag(IntFlag):
    """The codecs that a frame's payload was encoded with."""

    ZSTD = 1
    LZ4 = 2
    FP8 = 4
    INT8 = 8
    AES_GCM = 16


_NAMES = {str(flag.name).lower().replace("_", "-"): flag for flag in CodecFlag}
QuantizedDtype = Literal["fp8", "int8"]
_QUANTIZED = {"fp8": "fp8_e4m3", "int8": "int8"}
_LOSSY: dict[CodecFlag, QuantizedDtype] = {CodecFlag.FP8: "fp8", CodecFlag.INT8: "int8"}
_LOSSLESS: dict[CodecFlag, type[Zstd | Lz4]] = {CodecFlag.ZSTD: Zstd, CodecFlag.LZ4: Lz4}
_AS_IT_IS = CodecFlag(0)
_LOSSY_FLAGS = CodecFlag.FP8 | CodecFlag.INT8
_LOSSLESS_FLAGS = CodecFlag.ZSTD | CodecFlag.LZ4


@dataclass(frozen=True, slots=True)
class Codecs:
    """The codecs of one store. Thread-safe.

    Attributes:
        quantized: the type that values are rounded to.
        compression: the compression of payloads; frames differ in length then.
        cipher: the cipher of payloads and tokens.
    """

    quantized: QuantizedDtype | None = None
    compression: CodecFlag | None = None
    cipher: Cipher | None = None

    @classmethod
    def parse(cls, text: str | None, key_file: str | None) -> Self:
        """Parses ``zstd``, ``fp8+zstd+aes-gcm`` and the like; ``None`` or empty means no codec.

        Raises:
            ConfigurationError: the combination is unknown or impossible, or the key is unusable.
            MissingExtra: a package is not installed.
        """
        names = codec_names(text)
        lossy = [_LOSSY[flag] for name in names if (flag := _NAMES[name]) in _LOSSY]
        lossless = [flag for name in names if (flag := _NAMES[name]) in _LOSSLESS]
        encrypts = "aes-gcm" in names
        if encrypts and not key_file:
            raise ConfigurationError("codec=aes-gcm: needs key_file=, a file with a secret key")
        if key_file and not encrypts:
            raise ConfigurationError(f"key_file={key_file}: is for codec=aes-gcm")
        for flag in lossless:
            _compressor(flag)
        cipher = Cipher.from_file(key_file) if encrypts and key_file else None
        return cls(lossy[0] if lossy else None, lossless[0] if lossless else None, cipher)

    def __str__(self) -> str:
        parts = [self.quantized, self.compression and _name(self.compression)]
        return "+".join(part for part in (*parts, "aes-gcm" if self.cipher else None) if part)

    def __bool__(self) -> bool:
        return bool(self.quantized or self.compression or self.cipher)

    @property
    def identity(self) -> bytes:
        """The identity that reader and writer must share; empty if any reader can read."""
        parts = (self.quantized or "").encode(), b"" if self.cipher is None else self.cipher.id
        return b"/".join(parts) if any(parts) else b""

    def most_nbytes(self, layout: KvCacheLayout) -> int:
        """Returns the most bytes of an encoded payload; without compression, the exact number.

        Raises:
            ConfigurationError: blocks of `layout` cannot be encoded by these codecs.
        """
        if self.quantized is None:
            return layout.block_nbytes
        from kvconnect.kernels.quantized_payload import quantized_nbytes

        nbytes = quantized_nbytes(layout)
        if nbytes >= layout.block_nbytes:
            raise ConfigurationError(
                f"codec={self.quantized}: {nbytes} bytes instead of {layout.block_nbytes} for a "
                "block of so short rows; use a lossless codec"
            )
        return nbytes

    # ------------------------------------------------------------------ encoding

    def encode(
        self, payload: Tensor, header: FrameHeader, layout: KvCacheLayout, scratch: Tensor
    ) -> Tensor | None:
        """Encodes `payload` and seals a frame with it at the beginning of `scratch`.

        Blocks the calling thread.

        Args:
            payload: the block's bytes; not changed.
            header: the header of a frame that is not encoded.
            layout: the layout of the block.
            scratch: memory as large as the frame without encoding.

        Returns:
            The frame; ``None`` if compression is the only codec and does not make the frame
            smaller.
        """
        flags, source = _AS_IT_IS, payload.numpy().data
        if self.quantized is not None:
            from kvconnect.kernels.quantized_payload import quantize_payload, quantized_nbytes

            rounded = frame.payload(scratch, quantized_nbytes(layout))
            quantize_payload(payload, layout, rounded, dtype=_QUANTIZED[self.quantized])
            source = rounded.numpy().data
            flags |= _NAMES[self.quantized]
        if self.compression is not None:
            packed = _compressor(self.compression).compress(source)
            if frame_nbytes(len(packed)) < frame_nbytes(len(source)):
                source = memoryview(packed)
                flags |= self.compression
        if self.cipher is not None:
            flags |= CodecFlag.AES_GCM
        if not flags:
            return None
        out = scratch[: frame_nbytes(len(source))]
        sealed = header._replace(payload_nbytes=len(source), flags=flags)
        inside = frame.payload(out, len(source)).numpy().data
        if self.cipher is not None:
            beside = self.cipher.encrypt(source, inside, header.key, frame.fields(sealed))
            sealed = sealed._replace(codec_data=beside)
        elif flags & _LOSSLESS_FLAGS:
            inside[:] = source
        frame.seal(out, sealed)
        return out

    # ------------------------------------------------------------------ decoding

    def check_flags(self, header: FrameHeader) -> CodecFlag:
        """Returns the codecs of the frame of `header`.

        Raises:
            OtherCodec: the frame is sound, but cannot be used with these codecs.
            BadFrame: no codecs can use the frame.
        """
        if not header.flags and not self:
            return _AS_IT_IS
        flags = CodecFlag(header.flags & sum(CodecFlag))
        if (
            flags != header.flags
            or flags & _LOSSY_FLAGS == _LOSSY_FLAGS
            or flags & _LOSSLESS_FLAGS == _LOSSLESS_FLAGS
        ):
            raise BadFrame(f"encoded in an unknown way ({header.flags:#x})")
        lossy = flags & _LOSSY_FLAGS
        if lossy != (_NAMES[self.quantized] if self.quantized else 0):
            raise OtherCodec(f"{_said(lossy)}, configured is {_said(str(self))}")
        if bool(flags & CodecFlag.AES_GCM) != (self.cipher is not None):
            known = "encrypted, no key_file is configured"
            raise OtherCodec("not encrypted, aes-gcm is configured" if self.cipher else known)
        return flags

    def decode(
        self, sealed: Tensor, header: FrameHeader, out: Tensor, layout: KvCacheLayout
    ) -> None:
        """Fills `out` with the block's bytes from its frame `sealed`, which may begin before `out`.

        `sealed` has been checked, and is undefined afterwards. Blocks the calling thread. Allocates
        memory for two more blocks at most, whatever lengths the frame claims.

        Raises:
            OtherCodec: the frame is sound, but cannot be used with these codecs.
            BadFrame: it does not decode to a block of `layout`.
        """
        flags = self.check_flags(header)
        inside = frame.payload(sealed, header.payload_nbytes)
        source = inside.numpy().data
        if self.cipher is not None:
            self.cipher.decrypt(source, header.key, frame.fields(header), header.codec_data)
        nbytes = self.most_nbytes(layout)
        if packed := flags & _LOSSLESS_FLAGS:
            source = memoryview(_decompressed(packed, source, nbytes))
        elif len(source) != nbytes:
            raise BadFrame(f"{len(source)} bytes of payload, {nbytes} are expected")
        if self.quantized is not None:
            import torch

            from kvconnect.kernels.quantized_payload import dequantize_payload

            rounded = torch.frombuffer(bytearray(source), dtype=torch.uint8)
            dequantize_payload(rounded, layout, out, dtype=_QUANTIZED[self.quantized])
        elif packed or inside.data_ptr() != out.data_ptr():
            out.numpy().data[:] = source


def codec_names(text: str | None) -> list[str]:
    """Returns the names in a parameter ``codec``, whether their packages are installed or not.

    Raises:
        ConfigurationError: an unknown or impossible combination.
    """
    names = text.split("+") if text else []
    for name in names:
        if name not in _NAMES:
            raise ConfigurationError(f"codec={text}: unknown '{name}'; {nearest(name, _NAMES)}")
    kinds = [_order(name) for name in names]
    if kinds != sorted(kinds):
        raise ConfigurationError(
            f"codec={text}: give one of fp8 and int8, then one of zstd and lz4, then aes-gcm"
        )
    if len(set(kinds)) < len(kinds):
        raise ConfigurationError(f"codec={text}: gives two of a kind; give one of them")
    return names


@cache
def _compressor(flag: CodecFlag) -> Zstd | Lz4:
    return _LOSSLESS[flag]()


def _decompressed(flag: CodecFlag, source: memoryview, nbytes: int) -> bytes:
    try:
        compressor = _compressor(flag)
    except MissingExtra as error:
        raise OtherCodec(str(error)) from error
    return compressor.decompress(source, nbytes)


def _order(name: str) -> int:
    flag = _NAMES[name]
    return 0 if flag in _LOSSY else 1 if flag in _LOSSLESS else 2


def _name(flag: CodecFlag) -> str:
    return next((name for name, one in _NAMES.items() if one == flag), "")


def _said(what: CodecFlag | str) -> str:
    name = what if isinstance(what, str) else _name(what)
    return f"codec={name}" if name else "no codec"
