"""Compiles CUDA C++ to machine code at run time, with the NVRTC of torch's CUDA builds.

No CUDA toolkit is needed. The results are cubins, since PTX newer than the driver does not load.
"""

from __future__ import annotations

import ctypes
import re
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from kvconnect.kernels.cuda.compile.cubin_cache import CubinCache, CubinKey
from kvconnect.kernels.cuda.compile.sources import CompiledPart, source_text

_SUCCESS = 0
_MAIN = re.compile(r"libnvrtc\.so\.(\d+)(\.\d+)*")
_BUILTINS = re.compile(r"libnvrtc-builtins\.so\.(\d+\.\d+)(\.\d+)*")


class NvrtcMissing(RuntimeError):
    """The error that no NVRTC was found or can be loaded; the message names the paths."""


class CompileFailed(RuntimeError):
    """The error that NVRTC refused a source; the message holds its log."""


class Nvrtc:
    """The NVRTC compiler of one library file, which the first `compile` loads. Thread-safe.

    Args:
        library: ``libnvrtc.so.<major>``.
        builtins: ``libnvrtc-builtins.so.<major>.<minor>``.
    """

    def __init__(self, library: Path, builtins: Path) -> None:
        self.path = library
        self._builtins = builtins
        self._lock = threading.Lock()
        self._loaded: ctypes.CDLL | None = None

    @property
    def version(self) -> str:
        """The version of NVRTC, such as ``13.0``.

        The file's name gives it. Loading the library, 100 MB, only to find a cubin in the cache
        would take too long.
        """
        match = _BUILTINS.fullmatch(self._builtins.name)
        return match[1] if match else self._builtins.name

    def compile(self, source: str, name: str, options: Sequence[str]) -> bytes:
        """Compiles `source` and returns the cubin; blocks meanwhile.

        Args:
            source: the whole text.
            name: the name of the source in messages.
            options: the compiler's options, with ``--gpu-architecture=sm_<n>`` among them.

        Raises:
            CompileFailed: NVRTC refuses the source.
            NvrtcMissing: the library does not load.
        """
        nvrtc = self._library()
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            *(ctypes.byref(program), source.encode(), name.encode(), 0, None, None),
        )
        try:
            encoded = [option.encode() for option in options]
            array = (ctypes.c_char_p * len(encoded))(*encoded)
            code = nvrtc.nvrtcCompileProgram(program, len(encoded), array)
            if code != _SUCCESS:
                log = self._bytes("nvrtcGetProgramLog", program).rstrip(b"\0").decode()
                raise CompileFailed(f"{name} with {' '.join(options)}: {self._error(code)}\n{log}")
            return self._bytes("nvrtcGetCUBIN", program)
        finally:
            nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    def _library(self) -> ctypes.CDLL:
        with self._lock:
            if self._loaded is None:
                try:
                    # The library of the CUDA 13 wheels looks for its builtins by name only (it has
                    # no RUNPATH); once they are loaded, it finds them.
                    ctypes.CDLL(str(self._builtins), mode=ctypes.RTLD_GLOBAL)
                    self._loaded = ctypes.CDLL(str(self.path))
                except OSError as error:
                    raise NvrtcMissing(f"{self.path} does not load: {error}") from error
                self._loaded.nvrtcGetErrorString.restype = ctypes.c_char_p
            return self._loaded

    def _bytes(self, function: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{function}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(function, program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._library(), function)(*arguments)
        if code != _SUCCESS:
            raise CompileFailed(f"{function}: {self._error(code)}")

    def _error(self, code: int) -> str:
        text: bytes = self._library().nvrtcGetErrorString(code)
        return text.decode()


def find_nvrtc(folders: Iterable[Path] | None = None) -> Nvrtc:
    """Returns an installed NVRTC, best of the major version of torch's CUDA.

    Args:
        folders: the folders to search, in this order; by default those of this Python's packages,
            then the toolkit's usual folders.

    Raises:
        NvrtcMissing: no folder has one; the message names the folders.
    """
    return _usual_nvrtc() if folders is None else _first_of(list(folders))


@cache
def _usual_nvrtc() -> Nvrtc:
    return _first_of(list(_usual_folders()))


def compile_part(part: CompiledPart, arch: str, nvrtc: Nvrtc, cubins: CubinCache) -> bytes:
    """Returns the cubin of `part` for `arch` (``sm_<n>``) from the cache, or compiles it.

    Raises:
        CompileFailed, NvrtcMissing: as `Nvrtc.compile`.
    """
    options = (f"--gpu-architecture={arch}", *part.options)
    source = source_text(part.file)
    key = CubinKey(source, arch, nvrtc.version, options)
    return cubins.get(key, lambda: nvrtc.compile(source, f"{part.file}.cu", options))


def _first_of(folders: Sequence[Path]) -> Nvrtc:
    for nvrtc in sorted(_installed(folders), key=_of_other_cuda):
        return nvrtc
    places = ", ".join(map(str, folders))
    raise NvrtcMissing(
        "NVRTC (libnvrtc.so.<n> and libnvrtc-builtins.so.<n>) was not found; searched: "
        f"{places}. torch's CUDA builds bring it, or: pip install nvidia-cuda-nvrtc"
    )


def _installed(folders: Iterable[Path]) -> Iterator[Nvrtc]:
    for folder in folders:
        for library in sorted(folder.glob("libnvrtc.so.*")):
            match = _MAIN.fullmatch(library.name)
            builtins = sorted(folder.glob(f"libnvrtc-builtins.so.{match[1]}.*")) if match else []
            if builtins:
                yield Nvrtc(library, builtins[-1])


def _of_other_cuda(nvrtc: Nvrtc) -> bool:
    # False sorts first, and the order of folders decides among equals.
    cuda = torch.version.cuda
    return cuda is not None and nvrtc.version.split(".")[0] != cuda.split(".")[0]


def _usual_folders() -> Iterator[Path]:
    spec = find_spec("nvidia")
    packages = list(spec.submodule_search_locations or ()) if spec else []
    # Named even where nothing is installed, so that the message says where to look.
    for root in map(Path, packages or [f"{sysconfig.get_path('purelib')}/nvidia"]):
        yield from sorted(root.glob("cu[0-9]*/lib"), reverse=True)
        yield root / "cuda_nvrtc" / "lib"
    yield Path(torch.__file__).parent / "lib"
    yield from (Path("/usr/local/cuda/lib64"), Path("/usr/lib/x86_64-linux-gnu"))
