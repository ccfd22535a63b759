"""The CUDA sources compile for all architectures, small enough to keep everything in registers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cuda_tools import ARCHS, disassembler, parts, sass_of, usage_in, usage_of

from kvconnect.kernels.cuda.compile.cubin_cache import CubinCache
from kvconnect.kernels.cuda.compile.nvrtc import compile_part
from kvconnect.kernels.cuda.compile.sources import source_text

ENTRIES = {
    "copy_runs": ["copy_inline", "copy_inline_prefixes", "copy_listed", "copy_listed_prefixes"],
    "update": ["update_padded", "update_packed"],
    "append": ["append"],
}
USUAL = list(parts([16]))
EVERY = [part for part in parts([16, 8, 4, 2, 1]) if part not in USUAL]


def name_of(part):
    return f"{part.file}-{part.vector_nbytes}"


every_part = pytest.mark.parametrize(
    "part",
    [pytest.param(part, id=name_of(part)) for part in USUAL]
    + [pytest.param(part, id=name_of(part), marks=pytest.mark.slow) for part in EVERY],
)
every_arch = pytest.mark.parametrize("arch", ARCHS)


def check_usage(usage, part):
    assert sorted(usage) == sorted(ENTRIES[part.file])
    for entry, used in usage.items():
        assert used.registers <= 64, entry
        assert used.spilled == used.stack == 0, entry


@every_arch
@every_part
def test_nvrtc_makes_cubins_without_spills_in_64_registers(nvrtc, tmp_path, part, arch):
    cubin = compile_part(part, arch, nvrtc, CubinCache(tmp_path))
    assert cubin[:4] == b"\x7fELF"
    check_usage(usage_in(cubin), part)


@pytest.mark.parametrize(
    "arch",  # NVRTC is the compiler that matters; a second opinion on one of them will do
    [pytest.param(arch, marks=[] if arch == "sm_90" else pytest.mark.slow) for arch in ARCHS],
)
@every_part
def test_nvcc_makes_cubins_without_spills_in_64_registers(nvcc, tmp_path, part, arch):
    source = tmp_path / f"{part.file}.cu"
    source.write_text(source_text(part.file), encoding="utf-8")
    command = [nvcc, "-cubin", f"-arch={arch}", *part.options, "-Xptxas", "-v", "-Werror"]
    command += ["all-warnings", source.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check_usage(usage_of(done.stdout + done.stderr), part)


def test_a_kernel_that_spills_is_seen(nvrtc, nvcc, tmp_path):
    # An array that is indexed by what is known at run time only is not kept in registers.
    source = tmp_path / "spills.cu"
    source.write_text(
        """extern "C" __global__ void spills(int* p, int n) {
            int kept[64];
            for (int i = 0; i < 64; ++i) kept[(i * n) & 63] = p[i];
            for (int i = 0; i < 64; ++i) p[i] = kept[(i + n) & 63];
        }""",
        encoding="utf-8",
    )
    command = [nvcc, "-cubin", "-arch=sm_90", "-Xptxas", "-v", source.name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    told = usage_of(done.stdout + done.stderr)
    options = ["--gpu-architecture=sm_90"]
    seen = usage_in(nvrtc.compile(source.read_text(encoding="utf-8"), "spills.cu", options))
    assert told["spills"].stack == seen["spills"].stack == 256
    assert told["spills"].registers == seen["spills"].registers


@every_arch
@pytest.mark.parametrize("part", USUAL, ids=name_of)
def test_four_loads_of_128_bits_come_before_the_first_store(nvrtc, tmp_path, part, arch):
    tool = disassembler()
    if tool is None:
        pytest.skip("nvdisasm is neither on PATH nor in triton's package")
    path = Path(tmp_path / "kernel.cubin")
    path.write_bytes(compile_part(part, arch, nvrtc, CubinCache(tmp_path)))
    for entry, instructions in sass_of(tool, path).items():
        loads = [i for i, name in enumerate(instructions) if is_wide(name, "LDG")]
        stores = [i for i, name in enumerate(instructions) if is_wide(name, "STG")]
        assert len(loads) == len(stores) == 4, entry
        assert max(loads) < min(stores), entry
        spilled = {name for name in instructions if name.startswith(("LDL", "STL"))}
        assert not spilled, entry
        narrow = {n for n in instructions if n.startswith("STG") and not is_wide(n, "STG")}
        assert not narrow, entry


def is_wide(name, kind):
    return name.startswith(kind) and name.endswith(".128")
