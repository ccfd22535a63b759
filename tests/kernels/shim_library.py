"""The kernels compiled with g++ against `shim.h`, and launched on memory of this process."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from kvconnect.kernels.cuda.compile.sources import VECTOR_NBYTES, Kernel, source_text

SHIM = Path(__file__).with_name("shim.h")
ENTRY = re.compile(r"^KERNEL (\w+)\(", re.MULTILINE)
FLAGS = ("-std=c++17", "-shared", "-fPIC", "-w")
UBSAN = ("-O0", "-fsanitize=undefined", "-static-libubsan")


class What(IntEnum):
    """Kinds of violations, as in `shim.h`."""

    READ = 0
    WRITE = 1
    MISALIGNED = 2
    UNDEFINED = 3
    SIZE = 4


class Violation(Exception):
    """A kernel did what it must not."""


class Report(ctypes.Structure):
    """As in `shim.h`."""

    _fields_ = (
        ("violations", ctypes.c_uint64),
        ("first_what", ctypes.c_uint64),
        ("first_address", ctypes.c_uint64),
        ("first_nbytes", ctypes.c_uint64),
        ("reads", ctypes.c_uint64 * 17),
        ("writes", ctypes.c_uint64 * 17),
    )


@dataclass(frozen=True)
class Region:
    """Memory that kernels may read, or also write."""

    begin: int
    nbytes: int
    writable: bool


def compiler() -> str | None:
    return shutil.which("g++")


class ShimLibrary:
    """The sources, each compiled when one of its kernels is first launched, for all widths.

    Args:
        folder: where compiled libraries are kept, by what they were made of.
        flags: for the compiler.
        edit: changes the text of a source before: a planted error.
    """

    def __init__(self, folder: Path, *, flags=UBSAN, edit=None) -> None:
        self.folder = folder
        self.flags = flags
        self.edit = edit
        self._libraries: dict[str, ctypes.CDLL] = {}

    def launch(
        self,
        kernel: Kernel,
        ctas: int,
        params: array,
        regions: Sequence[Region],
        only: range | None = None,
    ) -> Report:
        """Run CTAs of a grid of `ctas`, all or `only` some, which may touch `regions`."""
        file, width = kernel.part.file, kernel.part.vector_nbytes
        library = self._libraries.get(file)
        if library is None:
            library = self._libraries[file] = self._compile(file)
        numbers = [
            number
            for region in regions
            for number in (region.begin, region.begin + region.nbytes, int(region.writable))
        ]
        table = (ctypes.c_uint64 * len(numbers))(*numbers)
        library.shim_regions(table, ctypes.c_uint64(len(regions)))
        data = params.tobytes()
        which = range(ctas) if only is None else only
        arguments = (data, ctypes.c_uint64(len(data)), ctas, which.start, which.stop)
        found = library.shim_launch(f"w{width}::{kernel.entry}".encode(), *arguments)
        assert found, f"no kernel {kernel.entry} in {file}.cu"
        report = Report()
        library.shim_report(ctypes.byref(report))
        if report.violations:
            raise Violation(
                f"{kernel.entry}: {report.violations} violations, the first one: "
                f"{What(report.first_what).name} of {report.first_nbytes} bytes at "
                f"{report.first_address:#x}"
            )
        return report

    def _compile(self, file: str) -> ctypes.CDLL:
        source = source_text(file)
        if self.edit is not None:
            source = self.edit(source)
        text = _all_widths(source)
        flags = (*FLAGS, *self.flags)
        name = hashlib.sha256(repr((text, SHIM.read_text(), flags)).encode()).hexdigest()[:32]
        path = self.folder / f"{file}-{name}.so"
        if not path.exists():
            code = path.with_suffix(".cpp")
            code.write_text(text, encoding="utf-8")
            made = path.with_suffix(f".{os.getpid()}.tmp")
            command = [compiler(), *flags, str(code), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            made.replace(path)
        return ctypes.CDLL(str(path))


def _all_widths(source: str) -> str:
    # In one file each, as kernels of one name; so they are no C functions here.
    kernels = source.replace('extern "C" __global__', "static")
    names = ENTRY.findall(source)
    parts, cases = [f'#include "{SHIM}"'], []
    for width in VECTOR_NBYTES:
        parts += (
            f"#define VECTOR_NBYTES {width}",
            f"namespace w{width} {{",
            kernels,
            "}",
            "#undef VECTOR_NBYTES",
        )
        cases += [
            f'    if (!strcmp(entry, "w{width}::{name}")) {{\n'
            f"        shim::run(w{width}::{name}, params, nbytes, grid, first, last);\n"
            "        return 1;\n    }"
            for name in names
        ]
    head = (
        'extern "C" int shim_launch(const char* entry, const void* params, uint64_t nbytes,\n'
        "                           unsigned grid, unsigned first, unsigned last) {"
    )
    return "\n".join([*parts, head, *cases, "    return 0;\n}\n"])
