"""The CUDA sources, and the parts of them that are compiled and launched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

VECTOR_NBYTES = (16, 8, 4, 2, 1)
"""The widths of memory access in bytes that parts are compiled for."""

_FOLDER = Path(__file__).parent
_SHARED = "vectors"


@dataclass(frozen=True, slots=True)
class CompiledPart:
    """A source file for one width of memory access, compiled and cached as a whole.

    Attributes:
        file: the name of the source without ``.cu``.
        vector_nbytes: the width in bytes, one of `VECTOR_NBYTES`.
    """

    file: str
    vector_nbytes: int

    @property
    def options(self) -> tuple[str, ...]:
        """The compiler's options but for the architecture; valid for nvcc and NVRTC."""
        return ("--std=c++17", f"-DVECTOR_NBYTES={self.vector_nbytes}")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: the compiled part and the name of its function, `entry`."""

    part: CompiledPart
    entry: str


@cache
def source_text(file: str) -> str:
    """Returns the text that is compiled for `file`: the shared source and that of `file`."""
    names = (_SHARED, file)
    return "\n".join((_FOLDER / f"{name}.cu").read_text(encoding="utf-8") for name in names)


def vector_nbytes(*alignments: int) -> int:
    """Returns the widest of `VECTOR_NBYTES` that divides all these addresses, strides and sizes."""
    bits = VECTOR_NBYTES[0]
    for value in alignments:
        bits |= value
    return bits & -bits
