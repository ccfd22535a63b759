"""NVRTC found and loaded, and what it made kept on disk."""

from __future__ import annotations

import threading

import pytest

from kvconnect.kernels.cuda.compile.cubin_cache import CubinCache, CubinKey, default_directory
from kvconnect.kernels.cuda.compile.nvrtc import CompileFailed, NvrtcMissing, find_nvrtc
from kvconnect.kernels.cuda.compile.sources import source_text, vector_nbytes

KEY = CubinKey("source", "sm_90", "13.0", ("-DX=1",))


class Made:
    """Counts how often it is asked for a cubin."""

    def __init__(self, cubin=b"\x7fELF cubin"):
        self.cubin = cubin
        self.times = 0

    def __call__(self):
        self.times += 1
        return self.cubin


@pytest.mark.parametrize(
    "other",
    [
        CubinKey("source2", "sm_90", "13.0", ("-DX=1",)),
        CubinKey("source", "sm_100", "13.0", ("-DX=1",)),
        CubinKey("source", "sm_90", "13.1", ("-DX=1",)),
        CubinKey("source", "sm_90", "13.0", ("-DX=2",)),
        CubinKey("source", "sm_90", "13.0", ()),
        CubinKey("source", "sm_9", "013.0", ("-DX=1",)),  # the same letters, cut elsewhere
    ],
)
def test_keys_differ_in_all_that_decides_the_cubin(other):
    assert KEY.digest() != other.digest()


def test_a_cubin_is_made_once_and_found_by_the_next_process(tmp_path):
    made = Made()
    assert CubinCache(tmp_path).get(KEY, made) == made.cubin
    assert CubinCache(tmp_path).get(KEY, made) == made.cubin
    assert made.times == 1


@pytest.mark.parametrize("damage", [b"", b"\x7fELF cubin", None])
def test_a_damaged_entry_is_made_again_and_replaced(tmp_path, damage):
    made = Made()
    cache = CubinCache(tmp_path)
    cache.get(KEY, made)
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if damage is None else damage)
    assert cache.get(KEY, made) == made.cubin
    assert made.times == 2
    assert file.read_bytes() == data


def test_no_half_written_file_is_left_or_found(tmp_path):
    cache = CubinCache(tmp_path)

    def fails():
        raise CompileFailed("planted")

    with pytest.raises(CompileFailed, match="planted"):
        cache.get(KEY, fails)
    assert not list(tmp_path.iterdir())
    (tmp_path / f"{KEY.digest()}.abc.tmp").write_bytes(b"half")  # of a process that was killed
    made = Made()
    cache.get(KEY, made)
    assert made.times == 1


def test_a_directory_that_cannot_be_written_costs_time_only(tmp_path):
    file = tmp_path / "file"
    file.touch()
    made = Made()
    assert CubinCache(file / "below").get(KEY, made) == made.cubin


def test_many_threads_get_the_same_bytes(tmp_path):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(CubinCache(tmp_path).get(KEY, Made())))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"\x7fELF cubin"] * 8
    assert [file.name for file in tmp_path.iterdir()] == [f"{KEY.digest()}.cubin"]


@pytest.mark.parametrize(
    ("configured", "inside"),
    [("{tmp}/cache", "{tmp}/cache"), ("relative", "{tmp}/.cache"), ("", "{tmp}/.cache")],
)
def test_the_cache_is_where_the_user_keeps_caches(monkeypatch, tmp_path, configured, inside):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", configured.format(tmp=tmp_path))
    expected = f"{inside.format(tmp=tmp_path)}/kvconnect/cubins"
    assert str(default_directory()) == expected


def test_what_was_searched_is_said(tmp_path):
    (tmp_path / "libnvrtc.so.13").touch()  # without builtins it is of no use
    with pytest.raises(NvrtcMissing, match=r"searched: .*one, .*two") as found:
        find_nvrtc([tmp_path / "one", tmp_path / "two"])
    assert "pip install nvidia-cuda-nvrtc" in str(found.value)
    with pytest.raises(NvrtcMissing, match=str(tmp_path)):
        find_nvrtc([tmp_path])


def test_a_library_that_does_not_load_is_named(tmp_path):
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (tmp_path / name).write_bytes(b"no library")
    nvrtc = find_nvrtc([tmp_path])
    assert nvrtc.version == "13.0", "known without loading it"
    with pytest.raises(NvrtcMissing, match=r"libnvrtc\.so\.13"):
        nvrtc.compile("", "x.cu", [])


def test_errors_of_a_source_are_in_the_message(nvrtc):
    with pytest.raises(CompileFailed, match=r"planted\.cu\(2\)"):
        nvrtc.compile("int x;\nint y = z;", "planted.cu", ["--gpu-architecture=sm_90"])


@pytest.mark.parametrize(
    ("numbers", "width"),
    [((0,), 16), ((32, 48), 16), ((16, 8), 8), ((16, 24, 4), 4), ((6,), 2), ((16, 7), 1)],
)
def test_the_width_of_an_access_divides_all_it_has_to(numbers, width):
    assert vector_nbytes(*numbers) == width


@pytest.mark.parametrize("file", ["copy_runs", "update", "append"])
def test_the_sources_include_nothing(file):
    assert "#include" not in source_text(file)
