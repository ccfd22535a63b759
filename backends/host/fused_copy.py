"""The copying and hashing of many values in one call, without the interpreter's lock in between.

In Python, each piece of a value is a call, after which the thread competes with the event loop for
the lock. With pieces that fit a core's cache, that costs more than it saves. If numba is installed,
it compiles one function of libc's ``memcpy`` and the C functions of the xxhash package. Both give
the same bytes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvconnect.frame import CHECKSUM_AT, HEADER_NBYTES

logger = logging.getLogger("kvconnect")

Bytes: TypeAlias = NDArray[np.uint8]
_Numbers: TypeAlias = NDArray[np.int64]

# The bytes of a piece; a core's cache holds twice as much, the source and the target.
_PIECE_NBYTES = 256 << 10
# The values copied in one call; the state of each hash takes half a KiB.
_STATES = 64
_ADDRESS = ctypes.c_int64
_CHECKED_NBYTES = (1000, 3 * _PIECE_NBYTES + 17)


class ValueCopy(NamedTuple):
    """A copy of one value.

    Attributes:
        parts: one pair or more of source and target, equally long and contiguous, one after the
            other in the value.
        end: the end of the value's frame, where the padding begins; 0: the value is not hashed.
    """

    parts: Sequence[tuple[Bytes, Bytes]]
    end: int


class FusedCopy:
    """A function that copies values and hashes the copies. Thread-safe; blocks.

    Raises:
        ImportError, AttributeError, OSError: numba, xxhash or a C function is missing.
    """

    def __init__(self) -> None:
        spec = importlib.util.find_spec("xxhash._xxhash")
        if spec is None or spec.origin is None:
            raise ImportError("xxhash is not made of C functions")
        self._loop = _compiled(ctypes.CDLL(spec.origin))
        # These functions keep the lock: they take less time than getting it back.
        held = ctypes.PyDLL(spec.origin)
        self._make_state = held.XXH3_createState
        self._make_state.restype = ctypes.c_void_p
        self._digest = held.XXH3_128bits_digest
        self._digest.argtypes, self._digest.restype = [ctypes.c_void_p], _Digest
        self._idle: list[_Numbers] = []
        self._check()

    def run(self, values: Sequence[ValueCopy]) -> list[bytes]:
        """Copies `values`; returns the digest of each, without its checksum and its padding.

        Raises:
            ValueError: a source and its target differ in length; it was not copied.
        """
        digests: list[bytes] = []
        for start in range(0, len(values), _STATES):
            digests += self._run(values[start : start + _STATES])
        return digests

    def _run(self, values: Sequence[ValueCopy]) -> list[bytes]:
        parts = [
            (number, source.ctypes.data, target.ctypes.data, _length(source, target))
            for number, value in enumerate(values)
            for source, target in value.parts
        ]
        ends = np.array([value.end for value in values], np.int64)
        try:
            states = self._idle.pop()
        except IndexError:
            # Kept for ever: there are as many sets as threads that ran here at once.
            states = np.array([self._make_state() for _ in range(_STATES)], np.int64)
        try:
            self._loop(np.array(parts, np.int64), ends, states)
            digests = map(self._digest, states[: len(values)].tolist())
            return [(each.high << 64 | each.low).to_bytes(16, "big") for each in digests]
        finally:
            self._idle.append(states)

    def _check(self) -> None:
        """Checks that copies and digests equal those of NumPy and the xxhash package."""
        for nbytes in _CHECKED_NBYTES:
            source = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
            target = np.zeros_like(source)
            parts = [(source[:500], target[:500]), (source[500:], target[500:])]
            (digest,) = self.run([ValueCopy(parts, nbytes - 5)])
            hashed = source[:CHECKSUM_AT].tobytes() + source[HEADER_NBYTES:-5].tobytes()
            if digest != xxhash.xxh3_128_digest(hashed) or not np.array_equal(source, target):
                raise ImportError("xxhash's C functions do not do what is expected of them")


class _Digest(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64))


class _Maker:
    """The maker of this process's `FusedCopy`, on a thread of its own: numba takes a second."""

    def __init__(self) -> None:
        self.made: FusedCopy | None = None
        self._lock = threading.Lock()
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread once; returns while another caller starts it."""
        # In a process forked meanwhile that thread does not run, and the lock would be held for
        # ever.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self.thread is not None:
                return
            thread = threading.Thread(target=self._make, name="kvconnect-numba")
            try:
                thread.start()
            except RuntimeError:  # no more threads are to be had now
                return
            self.thread = thread
        finally:
            self._lock.release()

    def _make(self) -> None:
        try:
            self.made = FusedCopy()
        except Exception as error:  # noqa: BLE001  numba may raise anything, and is not needed
            logger.debug("memory: values are copied piece by piece (%s)", error)


_maker = _Maker()


def fused_copy() -> FusedCopy | None:
    """Returns this process's `FusedCopy`; ``None`` where numba is not installed.

    Also returns ``None`` until it is made: the first call starts that.
    """
    if _maker.made is None:
        _maker.start()
    return _maker.made


def _compiled(hashes: ctypes.CDLL) -> Any:
    """Returns the loop over parts, ``(value, source, target, length)``, ends and states of values.

    Raises:
        ImportError, AttributeError: numba or one of the C functions is not there.
    """
    import numba

    copy = _function(ctypes.CDLL(None), "memcpy", 3)
    reset = _function(hashes, "XXH3_128bits_reset", 1)
    try:
        update = _function(hashes, "XXH3_128bits_update_dispatch", 3)  # for this very processor
    except AttributeError:
        update = _function(hashes, "XXH3_128bits_update", 3)

    def loop(parts: _Numbers, ends: _Numbers, states: _Numbers) -> None:
        at = 0
        for part in range(len(parts)):
            value, source, target, left = parts[part]
            state, end = states[value], ends[value]
            if part == 0 or parts[part - 1][0] != value:
                at = 0
                reset(state)
            while left > 0:
                nbytes = min(left, _PIECE_NBYTES)
                copy(target, source, nbytes)
                if at < CHECKSUM_AT and end:
                    update(state, target, min(nbytes, CHECKSUM_AT - at))
                start, stop = max(at, HEADER_NBYTES), min(at + nbytes, end)
                if start < stop:
                    update(state, target + start - at, stop - start)
                source += nbytes
                target += nbytes
                at += nbytes
                left -= nbytes

    compiled = numba.njit(nogil=True)(loop)
    compiled(np.zeros((0, 4), np.int64), *np.zeros((2, 0), np.int64))
    return compiled


def _function(library: ctypes.CDLL, name: str, arguments: int) -> Any:
    return ctypes.CFUNCTYPE(_ADDRESS, *[_ADDRESS] * arguments)((name, library))


def _length(source: Bytes, target: Bytes) -> int:
    if source.nbytes != target.nbytes:
        raise ValueError(f"{source.nbytes} bytes cannot be copied to {target.nbytes}")
    return source.nbytes
