"""export and import: one file from a store into another, whole or not at all."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from stored_blocks import NBYTES, chain, damage, entries, fill, frames, prompt_chain

from kvconnect import PromptStore
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.errors import BadFrame, ConfigurationError, RetryLater
from kvconnect.keys import Namespace
from kvconnect.operations import archive, import_
from kvconnect.testing.faults.clock import ShiftedClock

PROMPT = list(range(100, 122))


@pytest.fixture
def source(tmp_path) -> str:
    return f"disk:{tmp_path}/source?capacity=64MiB"


@pytest.fixture
def target(tmp_path) -> str:
    return f"disk:{tmp_path}/target?capacity=64MiB"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "prompts.kv"


@pytest.fixture
def key_file(tmp_path):
    (tmp_path / "key").write_bytes(b"k" * 32)
    return tmp_path / "key"


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr("kvconnect.operations.frame_reader._BATCH_NBYTES", 3 * NBYTES)
    monkeypatch.setattr("kvconnect.operations.import_._BATCH_NBYTES", 3 * NBYTES)


def known(url):
    """All that is known of each block but the times."""
    return {
        key: (
            one.nbytes,
            one.priority,
            one.parent,
            tuple(one.tokens),
            one.namespace,
            one.model,
            one.group,
            one.expires_at,
        )
        for key, one in entries(url).items()
    }


def test_export_brings_prompts_to_another_store_with_all_that_is_known_of_them(
    kvconnect, source, target, file
):
    mine = prompt_chain(PROMPT, namespace=Namespace("mine"))
    mine = [replace(one, expires_at=4e9) for one in mine]
    fill(source, [*mine, *prompt_chain(PROMPT), *chain("other", 3)])
    code, out, _ = kvconnect("export", source, "--salt", "mine", "-o", file, "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["blocks"], found["tokens"], found["complete"]) == (6, 22, True)
    assert oct(file.stat().st_mode)[-3:] == "600"
    code, out, _ = kvconnect("import", target, file)
    assert (code, out) == (0, "imported 6 blocks, 72 KiB, 22 tokens; 0 were there already\n")
    keys = [one.key for one in mine]
    assert known(target) == {key: known(source)[key] for key in keys}
    assert frames(target, keys) == frames(source, keys)
    assert {one.expires_at for one in entries(target).values()} == {4e9}
    assert json.loads(kvconnect("import", target, file, "--json")[1])["present"] == 6


def test_blocks_whose_time_is_over_are_left_out_of_an_import(kvconnect, source, target, file):
    mine = [replace(one, expires_at=time.time() + 3600) for one in prompt_chain(PROMPT)]
    fill(source, [*mine, *chain("other", 3)])
    assert kvconnect("export", source, "--all", "-o", file)[0] == 0
    with ShiftedClock() as clock:
        clock.forward(3601)
        code, out, _ = kvconnect("import", target, file)
        assert (code, out.endswith("; 0 were there already; 6 had expired\n")) == (0, True)
        assert entries(target).keys() == {one.key for one in chain("other", 3)}


def read(file, key):
    with archive.ArchiveReader(file, key) as reader:
        return list(reader.blocks())


def test_a_key_brings_the_blocks_before_it(kvconnect, source, target, file):
    blocks = prompt_chain(PROMPT)
    fill(source, blocks)
    assert kvconnect("export", source, "--key", blocks[3].key.hex()[:16], "-o", file)[0] == 0
    assert kvconnect("import", target, file)[0] == 0
    assert entries(target).keys() == {one.key for one in blocks[:4]}


def test_every_flipped_byte_is_refused_and_nothing_is_saved(
    source, target, file, key_file, monkeypatch
):
    fill(source, prompt_chain(PROMPT[:6]))
    store = PromptStore(source)
    for key in (None, key_file):
        store.export(file, everything=True, key_file=key)
        content = file.read_bytes()
        # All of header, records' beginnings, checksums, manifest; of the frames a sample.
        frame_at = [content.find(b"KVCFRAME"), content.rfind(b"KVCFRAME")]
        inside = {at for start in frame_at for at in range(start, start + NBYTES)}
        sampled = [at for at in range(len(content)) if at not in inside or at % 997 == 0]
        reader_key = archive.file_key(key)
        for at in sampled:
            wrong = bytearray(content)
            wrong[at] ^= 1 << at % 8
            file.write_bytes(wrong)
            with pytest.raises((BadFrame, ConfigurationError)):
                read(file, reader_key)
        file.write_bytes(content + b"\0")
        with pytest.raises(BadFrame, match="something follows its end"):
            PromptStore(target).import_(file, key_file=key)
        for end in (0, 31, 32, 40, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:end])
            with pytest.raises(BadFrame):
                PromptStore(target).import_(file, key_file=key)
    assert not (file.parent / "target").exists(), "nothing was opened"


def test_a_file_of_another_key_or_model_is_refused(kvconnect, source, target, file, tmp_path):
    (tmp_path / "key").write_bytes(b"k" * 32)
    (tmp_path / "other").write_bytes(b"o" * 32)
    fill(source, prompt_chain(PROMPT))
    keyed = ("--key-file", tmp_path / "key")
    assert kvconnect("export", source, "--all", "-o", file, *keyed)[0] == 0
    for options, code, message in (
        ((), 2, "was made with a key; give its key file"),
        (("--key-file", tmp_path / "other"), 1, "made with another key"),
        (("6f" * 4, *keyed), 2, "holds blocks of the model 6d6d6d6d6d6d6d6d…, not of 6f6f6f6f…"),
    ):
        found, _, err = kvconnect("import", target, file, *options)
        assert (found, message in err) == (code, True), err
    assert kvconnect("import", target, file, "6d" * 4, *keyed)[0] == 0
    plain = tmp_path / "plain.kv"
    kvconnect("export", source, "--all", "-o", plain)
    code, _, err = kvconnect("import", target, plain, *keyed)
    assert (code, "was made without a key" in err) == (2, True)
    code, _, err = kvconnect("import", target, tmp_path / "key")
    assert (code, "is no file of 'kvconnect export'" in err) == (1, True)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_length_that_cannot_be_takes_no_memory(file, monkeypatch, *, is_stream):
    """A stream has no length of its own: a frame of it is refused above a limit."""
    written = io.BytesIO()
    archive.ArchiveStream(written, b"")
    nbytes = archive._LONGEST_FRAME + is_stream
    written.write(archive._RECORD.pack(archive._BLOCK, 0, nbytes) + bytes(100))
    file.write_bytes(written.getvalue())
    monkeypatch.setattr(archive.torch, "empty", None)
    stream = file.open("rb") if is_stream else None
    said = "is damaged" if is_stream else "ends too early"
    with archive.ArchiveReader(file, b"", stream) as reader, pytest.raises(BadFrame, match=said):
        next(reader.blocks())


def test_an_import_has_few_blocks_in_memory_at_a_time(source, target, file, monkeypatch):
    fill(source, chain("many", 10))
    PromptStore(source).export(file, everything=True)
    sizes, plain = [], import_.save_missing

    async def counted(store, batch, done):
        sizes.append(len(batch))
        await plain(store, batch, done)

    monkeypatch.setattr(import_, "save_missing", counted)
    PromptStore(target).import_(file)
    assert sizes == [3, 3, 3, 1]


def test_a_file_with_a_bad_block_is_refused(target, file):
    blocks = prompt_chain(PROMPT)
    blocks[2].data[200] ^= 1
    with file.open("wb") as written:
        stream = archive.ArchiveStream(written, b"")
        for one in blocks:
            stream.add(one)
        stream.end()
    with pytest.raises(BadFrame, match="has a bad block: checksum mismatch"):
        PromptStore(target).import_(file)


def test_a_file_that_changes_after_the_check_is_refused_at_the_change(
    source, target, file, tmp_path, monkeypatch
):
    fill(source, prompt_chain(PROMPT))
    PromptStore(source).export(file, everything=True)
    other = tmp_path / "other.kv"
    PromptStore(source).export(other, everything=True)  # sound, but for its random number the same
    plain = import_._check

    def check(*arguments):
        manifest = plain(*arguments)
        other.replace(file)
        return manifest

    monkeypatch.setattr(import_, "_check", check)
    with pytest.raises(BadFrame, match="was changed after it had been checked"):
        PromptStore(target).import_(file)
    assert not entries(target)


KILLED = """
import os, signal, sys
from kvconnect import PromptStore
from kvconnect.operations import archive, frame_reader, import_
from kvconnect.backends.disk.store import DiskBackend
verb, url, file = sys.argv[1:]
calls = []
def counted(plain):
    def call(*arguments):
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments)
    return call
if verb == "export":
    frame_reader._BATCH_BLOCKS = 1
    archive.ArchiveWriter.add = counted(archive.ArchiveWriter.add)
    PromptStore(url).export(file, everything=True)
else:
    import_._BATCH_BLOCKS = 1
    DiskBackend.save = counted(DiskBackend.save)
    DiskBackend.save_sealed = counted(DiskBackend.save_sealed)
    PromptStore(url).import_(file)
"""


def killed(*arguments):
    done = subprocess.run([sys.executable, "-c", KILLED, *map(str, arguments)], check=False)
    assert done.returncode == -signal.SIGKILL


def test_export_and_import_that_were_killed_are_continued(kvconnect, source, target, file):
    blocks = prompt_chain(PROMPT)
    fill(source, blocks)
    killed("export", source, file)
    part = file.with_name(file.name + ".part")
    assert part.exists()
    assert not file.exists()
    with part.open("ab") as torn:
        torn.write(b"\1" + b"\0" * 40)  # the beginning of a record
    found = json.loads(kvconnect("export", source, "--all", "-o", file, "--json")[1])
    assert (found["blocks"], found["resumed"]) == (6, 3)
    assert found["bytes"] == 3 * NBYTES, "what was written stays, to the last block of a batch"
    assert not part.exists()
    killed("import", target, file)
    stored = len(entries(target))
    assert 1 <= stored < 6
    assert entries(target).keys() == {one.key for one in blocks[:stored]}, "beginnings of prompts"
    found = json.loads(kvconnect("import", target, file, "--json")[1])
    assert (found["present"], found["blocks"]) == (stored, 6 - stored)
    assert known(target) == known(source)


def test_a_part_of_other_blocks_is_not_continued(source, file, monkeypatch):
    fill(source, [*prompt_chain(PROMPT), *prompt_chain(PROMPT, namespace=Namespace("a"))])
    PromptStore(source).export(file, everything=True)
    file.rename(file.with_name(file.name + ".part"))
    done = PromptStore(source).export(file, salt="a")
    assert (done.resumed, done.blocks) == (0, 6)


def test_two_exports_to_one_file_do_not_mix(source, file):
    fill(source, prompt_chain(PROMPT))
    part = file.with_name(file.name + ".part")
    writer = archive.ArchiveWriter(part, b"")
    with pytest.raises(ConfigurationError, match="another process writes to it"):
        PromptStore(source).export(file, everything=True)
    writer.close()


def test_bad_blocks_are_left_out_and_nothing_makes_no_file(
    kvconnect, source, target, file, tmp_path
):
    blocks = prompt_chain(PROMPT)
    fill(source, blocks)
    damage(tmp_path / "source", blocks[2])
    code, out, err = kvconnect("export", source, "--all", "-o", file)
    assert (code, "1 are bad" in out) == (1, True)
    assert "1 bad blocks were left out" in err
    assert kvconnect("import", target, file)[0] == 0
    assert len(entries(target)) == 5
    code, _, err = kvconnect("export", source, "--salt", "x", "-o", tmp_path / "none.kv")
    assert (code, err) == (3, "kvconnect: error: no block matched\n")
    assert [path.name for path in tmp_path.glob("*.kv*")] == [file.name]


def test_a_target_that_takes_no_more_is_an_error(source, target, file, monkeypatch):
    fill(source, prompt_chain(PROMPT))
    PromptStore(source).export(file, everything=True)

    async def full(self, blocks, checksums=()):
        return 0

    monkeypatch.setattr(DiskBackend, "save", full)
    with pytest.raises(RetryLater, match="takes no more blocks"):
        PromptStore(target).import_(file)


def test_only_regular_files_are_written_and_read(kvconnect, source, target, file):
    """A complete file takes the place of its path: no device, no pipe, no link may go for it."""
    fill(source, prompt_chain(PROMPT))
    pipe, link = file.with_name("pipe"), file.with_name("link")
    os.mkfifo(pipe)
    link.symlink_to(file)
    for path in (pipe, link):
        code, _, err = kvconnect("export", source, "--all", "-o", path)
        assert code == 2
        assert "is no regular file; give the path of one" in err
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert not file.exists()
    # No process writes to the pipe.
    code, _, err = kvconnect("import", target, pipe)
    assert code == 2
    assert "it is read twice" in err
