"""Values that are copied and hashed in one call: the same bytes and checksums as piece by piece."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from itertools import accumulate, pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.backends.host import fused_copy as module
from kvconnect.backends.host.fused_copy import FusedCopy, ValueCopy, fused_copy
from kvconnect.frame import CHECKSUM_AT, HEADER_NBYTES

PIECE = 256 << 10


@pytest.fixture
def forgotten(monkeypatch):
    """As in a process that has not opened a store yet."""
    monkeypatch.setattr(module, "_maker", module._Maker())


def made():
    """Waits until it is made, or cannot be made."""
    fused_copy()
    if module._maker.thread is not None:
        module._maker.thread.join()
    return fused_copy()


lengths = st.lists(
    st.one_of(st.integers(1, 300), st.sampled_from([4096, PIECE - 1, PIECE, PIECE + 1])),
    min_size=1,
    max_size=4,
)


@given(frames=st.lists(st.tuples(lengths, st.integers(0, 5000)), min_size=1, max_size=5))
def test_every_byte_arrives_and_every_digest_is_right(frames):
    sources, targets, copies = [], [], []
    for number, (parts, padding) in enumerate(frames):
        source = np.random.default_rng(number).integers(0, 256, sum(parts), np.uint8)
        target = np.full(sum(parts) + 2, 0xC5, np.uint8)
        edges = pairwise(accumulate(parts, initial=0))
        pairs = [(source[a:b], target[1:-1][a:b]) for a, b in edges]
        sources.append(source)
        targets.append(target)
        copies.append(ValueCopy(pairs, max(1, sum(parts) - padding)))
    digests = made().run(copies)
    for source, target, copy, digest in zip(sources, targets, copies, digests, strict=True):
        assert np.array_equal(target[1:-1], source)
        assert (target[0], target[-1]) == (0xC5, 0xC5)
        hashed = source[:CHECKSUM_AT].tobytes() + source[HEADER_NBYTES : copy.end].tobytes()
        assert digest == xxhash.xxh3_128_digest(hashed)


def test_more_frames_than_are_hashed_at_once_and_several_threads():
    source = np.random.default_rng(0).integers(0, 256, (200, 8192), np.uint8)
    expected = [
        xxhash.xxh3_128_digest(row[:CHECKSUM_AT].tobytes() + row[HEADER_NBYTES:].tobytes())
        for row in source
    ]
    found = {}

    def work(thread):
        for _ in range(20):
            target = np.zeros_like(source)
            copies = [ValueCopy([pair], 8192) for pair in zip(source, target, strict=True)]
            found[thread] = made().run(copies), target

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for digests, target in found.values():
        assert digests == expected
        assert np.array_equal(target, source)


def test_what_is_not_to_be_hashed_is_copied_all_the_same():
    source = np.random.default_rng(0).integers(0, 256, 8192, np.uint8)
    target = np.zeros_like(source)
    assert made().run([ValueCopy([(source, target)], 0)]) == [xxhash.xxh3_128_digest(b"")]
    assert np.array_equal(target, source)


def test_a_target_that_is_too_short_is_refused_before_anything_is_copied():
    source, target = np.ones(4096, np.uint8), np.zeros(4096, np.uint8)
    parts = [(source[:2048], target[:2048]), (source, target[2048:])]
    with pytest.raises(ValueError, match="4096 bytes cannot be copied to 2048"):
        made().run([ValueCopy(parts, 4096)])
    assert not target.any()


@pytest.mark.usefixtures("forgotten")
def test_nobody_waits_for_it_to_be_made(monkeypatch):
    gate = threading.Event()
    compiled = module._compiled
    monkeypatch.setattr(module, "_compiled", lambda hashes: gate.wait() and compiled(hashes))
    assert fused_copy() is None
    assert fused_copy() is None
    gate.set()
    found = made()
    assert found is not None
    assert fused_copy() is found


@pytest.mark.usefixtures("forgotten")
def test_it_is_made_as_soon_as_there_is_a_thread_for_it(monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        assert made() is None
    assert made() is not None


@pytest.mark.usefixtures("forgotten")
def test_without_numba_there_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert made() is None


@pytest.mark.parametrize("error", [SystemError, RuntimeError, ValueError])
@pytest.mark.usefixtures("forgotten")
def test_a_numba_that_is_broken_is_not_used(error, tmp_path, monkeypatch):
    (tmp_path / "numba.py").write_text(f"raise {error.__name__}('a numba of another numpy')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "numba"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    assert made() is None
    assert not said


@pytest.mark.usefixtures("forgotten")
def test_nobody_waits_while_another_thread_begins_with_it():
    # Nor does the child of a process that forked meanwhile: there that thread is no more.
    with module._maker._lock:
        assert fused_copy() is None
    assert made() is not None


def hashing_too_little(loop):
    return lambda parts, ends, states: loop(parts, ends - 1, states)


def copying_something_else(loop):
    def work(parts, ends, states):
        loop(parts, ends, states)
        ctypes.memset(int(parts[0, 2]), 0, 1)

    return work


@pytest.mark.parametrize("wrong", [hashing_too_little, copying_something_else])
@pytest.mark.usefixtures("forgotten")
def test_functions_that_do_something_else_are_not_used(wrong, monkeypatch, caplog):
    compiled = module._compiled
    monkeypatch.setattr(module, "_compiled", lambda hashes: wrong(compiled(hashes)))
    with caplog.at_level(logging.DEBUG, "kvconnect"):
        assert made() is None
    assert "do not do what is expected of them" in caplog.text


@pytest.mark.usefixtures("forgotten")
def test_an_xxhash_without_its_c_functions_is_not_used(monkeypatch):
    monkeypatch.setattr(module, "_function", lambda library, name, arguments: library.n)
    assert made() is None


def test_states_are_used_again():
    fused, target = FusedCopy(), np.zeros(4096, np.uint8)
    for _ in range(3):
        fused.run([ValueCopy([(np.ones(4096, np.uint8), target)], 4096)])
    assert len(fused._idle) == 1


def test_states_that_another_thread_has_or_takes_first_are_made_anew():
    class Taken(list):
        def __bool__(self):
            return True

    fused, used, target = FusedCopy(), [], np.zeros(4096, np.uint8)
    copies = [ValueCopy([(np.ones(4096, np.uint8), target)], 4096)]
    loop, fused._idle = fused._loop, Taken(fused._idle)

    def interrupted(parts, ends, states):
        used.append(states)
        if len(used) == 1:  # as another thread would come in here
            fused.run(copies)
        loop(parts, ends, states)

    fused._loop = interrupted
    fused.run(copies)
    assert used[0] is not used[1]
    assert target.all()
