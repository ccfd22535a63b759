"""A content's digest is of every byte, however it is cut and whoever hashes it."""

from __future__ import annotations

import hashlib
import logging
import os
import random
from pathlib import Path

import pytest
import xxhash

from kvconnect.digest import content
from kvconnect.digest.content import Content, content_digests
from kvconnect.errors import ModelChanged

LEAF, PIECE, WHOLE = 1000, 300, 2500


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a test reaches."""
    for name, value in (("_LEAF", LEAF), ("_PIECE", PIECE), ("_WHOLE", WHOLE)):
        monkeypatch.setattr(content, name, value)


def digests_of(directory: Path, *data: bytes) -> list[bytes]:
    descriptors = []
    for number, one in enumerate(data):
        (directory / str(number)).write_bytes(one)
        descriptors.append(os.open(directory / str(number), os.O_RDONLY))
    try:
        return content_digests(list(map(Content, descriptors, map(len, data))))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.mark.parametrize("size", [0, 1, PIECE, WHOLE - 1, WHOLE])
def test_up_to_the_bound_it_is_one_hash_of_size_and_content(tmp_path, size):
    data = random.Random(size).randbytes(size)
    expected = hashlib.blake2b(size.to_bytes(8, "little") + data, digest_size=32).digest()
    assert digests_of(tmp_path, data) == [expected]


@pytest.mark.parametrize("size", [WHOLE + 1, 3 * LEAF, 7 * LEAF + 1])
def test_beyond_it_is_a_hash_of_leaves(tmp_path, size):
    data = random.Random(size).randbytes(size)
    leaves = [xxhash.xxh3_128_digest(data[at : at + LEAF]) for at in range(0, size, LEAF)]
    prefix = size.to_bytes(8, "little")
    expected = hashlib.blake2b(prefix + b"".join(leaves), digest_size=32, person=b"kvc-leaves")
    assert digests_of(tmp_path, data) == [expected.digest()]


def test_files_keep_their_order_and_do_not_mix(tmp_path):
    several = [random.Random(seed).randbytes(1 + 1700 * seed) for seed in range(4)]
    assert digests_of(tmp_path, *several) == [digests_of(tmp_path, one)[0] for one in several]


def test_a_file_that_got_shorter_is_refused(tmp_path):
    (tmp_path / "short").write_bytes(bytes(4 * LEAF))
    with (tmp_path / "short").open("rb") as file, pytest.raises(ModelChanged, match="try again"):
        content_digests([Content(file.fileno(), 5 * LEAF)])


def test_long_work_tells_how_far_it_is(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("kvconnect.digest.progress._SECONDS_BETWEEN_LINES", 0.0)
    with caplog.at_level(logging.INFO, "kvconnect.digest"):
        digests_of(tmp_path, bytes(3 * LEAF))
    assert len(caplog.messages) == 3
    assert all("digest of the weights: 0.0 of 0.0 GiB" in line for line in caplog.messages)
