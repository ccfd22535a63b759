"""Compilers and disassemblers of CUDA, where they are."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvconnect.kernels.cuda.compile.sources import CompiledPart

ARCHS = ["sm_80", "sm_90", "sm_100"]
FILES = ["copy_runs", "update", "append"]
_FRAME, _REGISTERS = 0x11, 0x2F
"""EIATTR_FRAME_SIZE and EIATTR_REGCOUNT of the section ``.nv.info``."""
_USED = re.compile(r"Compiling entry function '(\w+)'.*?(?=Compiling entry function|\Z)", re.DOTALL)


def parts(widths):
    """Every source in these widths."""
    for file in FILES:
        for width in widths:
            yield CompiledPart(file, width)


@dataclass(frozen=True)
class Usage:
    """What the assembler says of a kernel."""

    registers: int
    spilled: int
    stack: int


def usage_of(text: str) -> dict[str, Usage]:
    """By kernel, from the output of ``-Xptxas -v``."""
    found = {}
    for match in _USED.finditer(text):
        about = match[0]
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", about)))
        stack = int(re.search(r"(\d+) bytes stack frame", about)[1])
        registers = int(re.search(r"Used (\d+) registers", about)[1])
        found[match[1]] = Usage(registers, spilled, stack)
    return found


def usage_in(cubin: bytes) -> dict[str, Usage]:
    """By kernel, from the cubin itself: no tool is needed for that."""
    names = _symbols(cubin)
    numbers: dict[str, dict[int, int]] = {}
    info = _section(cubin, ".nv.info")
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != 4:  # the number is in the place of the size
            continue
        if attribute in {_REGISTERS, _FRAME}:
            symbol, value = struct.unpack_from("<II", info, at)
            numbers.setdefault(names[symbol], {})[attribute] = value
        at += size
    # What is spilled is in the frame.
    return {
        name: Usage(found[_REGISTERS], found[_FRAME], found[_FRAME])
        for name, found in numbers.items()
        if _REGISTERS in found and _FRAME in found
    }


def _sections(cubin: bytes) -> list[tuple[int, ...]]:
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<HH", cubin, 58)
    return [struct.unpack_from("<IIQQQQIIQQ", cubin, start + i * size) for i in range(count)]


def _text(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()


def _content(cubin: bytes, section: tuple[int, ...]) -> bytes:
    return cubin[section[4] : section[4] + section[5]]


def _section(cubin: bytes, name: str) -> bytes:
    sections = _sections(cubin)
    names = _content(cubin, sections[struct.unpack_from("<H", cubin, 62)[0]])
    (found,) = (one for one in sections if _text(names, one[0]) == name)
    return _content(cubin, found)


def _symbols(cubin: bytes) -> list[str]:
    table, names = _section(cubin, ".symtab"), _section(cubin, ".strtab")
    return [_text(names, struct.unpack_from("<I", table, at)[0]) for at in range(0, len(table), 24)]


def disassembler() -> Path | None:
    """nvdisasm: of the toolkit, or of triton's package."""
    path = shutil.which("nvdisasm")
    if path is not None:
        return Path(path)
    spec = find_spec("triton")
    for folder in spec.submodule_search_locations if spec else ():
        path = Path(folder) / "backends/nvidia/bin/nvdisasm"
        if path.exists():
            return path
    return None


def sass_of(tool: Path, cubin: Path) -> dict[str, list[str]]:
    """The instructions of each kernel, with their modifiers and nothing else."""
    done = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = {}
    for section in re.split(r"\.section\s+\.text\.", done.stdout)[1:]:
        name = re.match(r"\w+", section)[0]
        found[name] = re.findall(r"\*/\s+(?:@!?U?P\d\s+)?([A-Z][A-Z0-9_.]*)", section)
    return found
