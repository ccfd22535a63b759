"""ls, stats, verify, prune: looking at a store and deleting from it."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest
from stored_blocks import NBYTES, block, chain, damage, entries, fill, frames, key_of

from kvconnect.backend import Capabilities
from kvconnect.backends import open_backend
from kvconnect.backends.disk.directory import DiskDirectory
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.backends.url import StoreUrl
from kvconnect.keys import Namespace
from kvconnect.operations import frame_reader

WITHOUT_TORCH = """
import sys
from kvconnect.cli.main import main
code = main(sys.argv[1:])
print(*sorted({"torch", "transformers", "numba"} & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("command", "tiers"), [(("ls", "--json", "--sort", "age"), ""), (("stats",), "tiered:?tiers=")]
)
def test_looking_at_a_store_does_not_wait_for_torch(url, command, tiers):
    fill(url, chain("a", 3))
    place = tiers + url.partition("?")[0]
    program = [sys.executable, "-c", WITHOUT_TORCH, *command, place]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert "3 blocks" in done.stdout or key_of(("a", 2)).hex()[:16] in done.stdout


def age(directory, column, seconds):
    """Make the blocks of each name so many seconds old, by their key."""
    with closing(sqlite3.connect(directory / "index.sqlite3")) as db:
        for key, back in seconds.items():
            at = int((time.time() - back) * 1e6)
            db.execute(f"UPDATE blocks SET {column}=? WHERE key=?", (at, key))
        db.commit()


def rows(out):
    return [line.split() for line in out.splitlines()[1:]]


# ------------------------------------------------------------------------------------ ls


def test_ls_shows_what_is_known_of_each_block(kvconnect, url, directory):
    fill(url, [block("a")])
    age(directory, "created", {key_of("a"): 3 * 86400 + 5})
    code, out, err = kvconnect("ls", url)
    assert (code, err) == (0, "")
    assert rows(out) == [
        [key_of("a").hex()[:16], "12", "KiB", "3d", "now", "40", "4", "1", "6d6d6d6d", "6e6e6e6e"]
    ]


def test_ls_as_json_is_a_line_for_each_block_without_its_tokens(kvconnect, url):
    fill(url, chain("a", 3, expires_at=4e9))
    code, out, _ = kvconnect("ls", url, "--json")
    assert code == 0
    listed = {line["key"]: line for line in map(json.loads, out.splitlines())}
    second = listed[key_of(("a", 1)).hex()]
    assert second["parent"] == key_of(("a", 0)).hex()
    assert (second["bytes"], second["num_tokens"], second["group"]) == (NBYTES, 4, 1)
    assert (second["model"], second["namespace"]) == ("6d" * 32, "6e" * 32)
    assert second["expires_at"] == 4e9
    assert "tokens" not in second
    assert len(listed) == 3


@pytest.mark.parametrize(
    ("sort", "first"), [("age", "old"), ("used", "unused"), ("priority", "dear"), ("key", None)]
)
def test_ls_sorts_and_limits(kvconnect, url, directory, sort, first):
    names = ["old", "unused", "dear", "plain"]
    fill(url, [block(name, priority=90 if name == "dear" else 40) for name in names])
    age(directory, "created", {key_of(name): 60 + 60 * (name == "old") for name in names})
    age(directory, "used", {key_of(name): 30 + 20 * (name == "unused") for name in names})
    _, out, _ = kvconnect("ls", url, "--sort", sort, "--limit", 1)
    expected = key_of(first) if first else min(key_of(name) for name in names)
    assert [row[0] for row in rows(out)] == [expected.hex()[:16]]


def test_ls_without_sort_reads_no_further_than_it_must(kvconnect, url, monkeypatch):
    fill(url, chain("a", 40))
    monkeypatch.setattr("kvconnect.backends.disk.find._ROWS_PER_PAGE", 4)
    pages, page = [], DiskDirectory.page
    monkeypatch.setattr(
        DiskDirectory, "page", lambda self, after: pages.append(after) or page(self, after)
    )
    assert len(rows(kvconnect("ls", url, "--limit", 3)[1])) == 3
    assert len(pages) <= 5, "a slow machine reads some ahead"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--older-than", "1h"], "old"),
        (["--unused-for", "1h"], "unused"),
        (["--model", "aabbcc"], "model"),
        (["--salt", "tenant"], "salted"),
        (["--salt", "tenant", "--lora", "7"], "adapter"),
        (["--group", "5"], "group"),
        (["--group", "5", "--model", "ffff"], None),
    ],
)
def test_ls_selects(kvconnect, url, directory, options, found):
    special = {
        "old": {},
        "unused": {},
        "model": {"model": b"\xaa\xbb\xcc" + b"m" * 29},
        "salted": {"namespace": Namespace("tenant").encode()},
        "adapter": {"namespace": Namespace("tenant", 7).encode()},
        "group": {"group": 5},
    }
    fill(url, [block(name, **changes) for name, changes in special.items()])
    age(directory, "created", {key_of("old"): 7200})
    age(directory, "used", {key_of("unused"): 7200})
    _, out, _ = kvconnect("ls", url, *options)
    expected = [] if found is None else [key_of(found).hex()[:16]]
    assert [row[0] for row in rows(out)] == expected


# ------------------------------------------------------------------------------------ stats


def test_stats_divide_the_blocks(kvconnect, url):
    fill(url, [*chain("a", 3), block("b", model=b"o" * 32), block("c", group=0)])
    _, out, _ = kvconnect("stats", url, "--json")
    found = json.loads(out)
    assert found["store"]["blocks"] == 5
    listed = found["listed"]
    assert (listed["blocks"], listed["bytes"]) == (5, 5 * NBYTES)
    assert listed["by_model"] == {
        "6d" * 32: {"blocks": 4, "bytes": 4 * NBYTES},
        "6f" * 32: {"blocks": 1, "bytes": NBYTES},
    }
    assert listed["by_group"]["1"]["blocks"] == 4
    code, out, _ = kvconnect("stats", url)
    assert code == 0
    assert "6d6d6d6d6d6d6d6d         4 blocks, 48 KiB" in out


# ------------------------------------------------------------------------------------ verify


def test_stats_show_counts_in_full_and_memory_as_sizes(kvconnect, url, monkeypatch):
    fill(url, chain("a", 2))

    async def numbers(self):
        return {"blocks": 12345678.0, "used_memory": 3 << 30}

    monkeypatch.setattr(DiskBackend, "stats", numbers)
    lines = kvconnect("stats", url, "--quick")[1].splitlines()
    assert [line.split()[1:] for line in lines[1:3]] == [["12345678"], ["3", "GiB"]]


def test_verify_finds_a_flipped_bit_and_deletes_it_only_if_asked(kvconnect, url, directory):
    blocks = chain("a", 5)
    fill(url, blocks)
    damage(directory, blocks[3])
    for _ in range(2):
        code, out, err = kvconnect("verify", url)
        assert code == 1
        assert f"{blocks[3].key.hex()[:16]}: checksum mismatch" in out
        assert "1 of 5 blocks are bad; --delete deletes them" in err
    code, out, _ = kvconnect("verify", url, "--delete", "--json")
    assert code == 1
    report = json.loads(out)
    assert (report["sound"], report["bad"], report["deleted"]) == (4, 1, 1)
    code, out, err = kvconnect("verify", url)
    assert (code, err) == (0, "")
    assert out == f"{StoreUrl.parse(url)}: 4 blocks, 48 KiB, are sound; 0 are bad\n"
    assert entries(url).keys() == {one.key for one in blocks} - {blocks[3].key}


def test_verify_reads_more_than_one_batch(kvconnect, url, directory, monkeypatch):
    monkeypatch.setattr(frame_reader, "_BATCH_NBYTES", 3 * NBYTES)
    blocks = chain("a", 20)
    fill(url, blocks)
    for bad in (0, 7, 19):
        damage(directory, blocks[bad])
    code, out, _ = kvconnect("verify", url, "--json")
    assert code == 1
    report = json.loads(out)
    assert report["sound"] == 17
    keys = {one["key"] for one in report["bad_blocks"]}
    assert keys == {blocks[bad].key.hex() for bad in (0, 7, 19)}


def test_verify_checks_every_tier_by_itself(kvconnect, tmp_path):
    blocks = chain("a", 4)
    tiers = [f"disk:{tmp_path}/{name}?capacity=8MiB" for name in ("one", "two")]
    for tier in tiers:
        fill(tier, blocks)
    damage(tmp_path / "two", blocks[1])
    url = f"tiered:?tiers={','.join(tiers)}"
    code, out, _ = kvconnect("verify", url, "--json")
    assert code == 1
    report = json.loads(out)
    assert report["sound"] == 7
    assert [(one["store"], one["key"]) for one in report["bad_blocks"]] == [
        ("disk2", blocks[1].key.hex())
    ]
    kvconnect("verify", url, "--delete")
    assert [len(entries(tier)) for tier in tiers] == [4, 3]


def test_a_block_that_is_dropped_meanwhile_is_not_bad(kvconnect, url, monkeypatch):
    blocks = chain("a", 4)
    fill(url, blocks)
    original = frame_reader._Reader._load

    async def drop_first(self, found, buffers):
        if found:
            tool = open_backend(url, raw=True)
            await tool.open([])
            await tool.delete([blocks[2].key])
            await tool.close()
        return await original(self, found, buffers)

    monkeypatch.setattr(frame_reader._Reader, "_load", drop_first)
    code, out, _ = kvconnect("verify", url)
    assert code == 0
    assert out.endswith(": 3 blocks, 36 KiB, are sound; 0 are bad; 1 were dropped meanwhile\n")


def test_stats_shows_the_capacity_and_nothing_of_its_own_calls(kvconnect, url):
    fill(url, chain("a", 2))
    _, out, _ = kvconnect("stats", url, "--json")
    found = json.loads(out)["store"]
    assert found["capacity"] == 64 << 20
    assert not {"breaker_state", "running", "abandoned"} & found.keys()
    _, out, _ = kvconnect("stats", f"tiered:?tiers={url}", "--quick", "--json")
    assert not [name for name in json.loads(out)["store"] if name.endswith("breaker_state")]


# ------------------------------------------------------------------------------------ prune


def test_prune_deletes_what_is_old(kvconnect, url, directory):
    fill(url, chain("a", 4))
    age(directory, "created", {key_of(("a", n)): 86400 * (n + 5) for n in range(4)})
    for more, said, left in ((("--dry-run",), "would delete", 4), ((), "deleted", 2)):
        code, out, _ = kvconnect("prune", url, "--older-than", "7d", *more)
        assert (code, out) == (0, f"{said} 2 blocks, 24 KiB; 2 blocks, 24 KiB, stay\n")
        assert entries(url).keys() == {key_of(("a", n)) for n in range(left)}


def test_prune_to_a_size_takes_ends_before_beginnings_and_cheap_before_dear(kvconnect, url):
    fill(url, [*chain("dear", 4, priority=80), *chain("cheap", 4), *chain("later", 4)])
    for size, left in (
        (9, {"dear": 4, "cheap": 1, "later": 4}),
        (6, {"dear": 4, "cheap": 0, "later": 2}),
        (3, {"dear": 3, "cheap": 0, "later": 0}),
    ):
        code, out, _ = kvconnect("prune", url, "--to-size", f"{size * NBYTES}", "--json")
        assert code == 0
        assert json.loads(out)["kept_bytes"] == size * NBYTES
        expected = {key_of((name, n)) for name, count in left.items() for n in range(count)}
        assert entries(url).keys() == expected
    kvconnect("prune", url, "--to-size", "0")
    assert not entries(url)


@pytest.mark.parametrize(
    ("options", "deleted"),
    [
        (["--salt", "mine"], ["mine", "mine + adapter", "mine + vllm"]),
        (["--salt", "mine", "--lora", "adapter"], ["mine + adapter"]),
    ],
)
def test_a_salt_is_that_tenant_under_every_adapter_unless_one_is_named(
    kvconnect, url, options, deleted
):
    """vLLM's, TensorRT-LLM's and an adapter's blocks have namespaces of their own."""
    spaces = {
        "mine": Namespace("mine"),
        "mine + adapter": Namespace("mine", "adapter"),
        "mine + vllm": Namespace("mine", extra_key="vllm"),
        "yours": Namespace("yours", "adapter"),
        "nobody's": Namespace(),
        "adapter": Namespace(lora_id="adapter"),
    }
    for name, space in spaces.items():
        fill(url, chain(name, 2, namespace=space.tag()))
    code, out, err = kvconnect("prune", url, *options, "--json")
    assert code == 0
    assert (json.loads(out)["deleted"], json.loads(out)["unknown"]) == (2 * len(deleted), 0)
    assert "not known" not in err
    left = {space.tag() for name, space in spaces.items() if name not in deleted}
    assert {entry.namespace for entry in entries(url).values()} == left


def test_what_is_not_known_of_a_salt_is_said(kvconnect, url):
    """Old blocks without an adapter are found all the same; of others it stays open."""
    for space in (Namespace("mine"), Namespace("mine", "adapter"), Namespace()):
        fill(url, chain(repr(space), 2, namespace=space.encode()))
    code, out, err = kvconnect("prune", url, "--salt", "mine")
    assert code == 0
    assert out.startswith("deleted 2 blocks")
    assert "of 2 blocks that stay it is not known whose they are" in err
    code, out, _ = kvconnect("prune", url, "--salt", "mine", "--json")
    assert (code, json.loads(out)["unknown"]) == (3, 2)


@pytest.mark.parametrize("named", [("--salt", "x"), ("--lora", "9"), ("--model", "abcd")])
def test_a_name_that_nothing_has_ends_with_3(kvconnect, url, named):
    fill(url, chain("a", 2, namespace=Namespace("mine").tag()))
    code, out, err = kvconnect("prune", url, *named)
    assert (code, out) == (3, "deleted 0 blocks, 0 B; 2 blocks, 24 KiB, stay\n")
    assert "no block matched" in err
    assert kvconnect("prune", url, "--older-than", "7d")[0] == 0, "nothing is that old, and is well"


def test_prune_with_a_size_deletes_only_among_what_is_selected(kvconnect, url):
    fill(url, [*chain("a", 4), *chain("b", 4, group=2)])
    kvconnect("prune", url, "--group", "2", "--to-size", str(6 * NBYTES))
    expected = {key_of(("a", n)) for n in range(4)} | {key_of(("b", n)) for n in range(2)}
    assert entries(url).keys() == expected


def test_a_running_engine_is_not_harmed_by_any_command(kvconnect, url, tmp_path, elsewhere):
    blocks = chain("a", 30)
    small = f"disk:{tmp_path}/kv?capacity={2 * NBYTES}"  # a slip of whoever types the command
    engine = open_backend(url, raw=True)
    elsewhere(engine.open([]))
    for one in blocks:
        assert elsewhere(engine.save([one])) == 1
    for command, *options in (
        ["ls"],
        ["stats"],
        ["verify"],
        ["verify", "--delete"],
        ["prune", "--group", "7"],
        ["copy", f"disk:{tmp_path}/other?capacity=8MiB"],
    ):
        assert kvconnect(command, small, *options)[0] == (3 if "--group" in options else 0)
        assert elsewhere(engine.lookup([one.key for one in blocks])) == 30
        assert elsewhere(engine.save([block((command, *options))])) == 1
    kvconnect("prune", small, "--to-size", "0")
    assert elsewhere(engine.lookup([blocks[0].key])) == 0
    assert elsewhere(engine.save(blocks)) == 30
    elsewhere(engine.close())
    assert len(entries(url)) == 30


# ------------------------------------------------------------------------------------ odd input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "nothing"], "a scheme is needed"),
        (["ls", "disk:{tmp}/absent"], "there is none in"),
        (["stats", "memory:"], "belongs to the process that opened it"),
        (["ls", "{url}", "--limit", "0"], "--limit 0: must be at least 1"),
        (["prune", "{url}"], "nothing says what to delete; give --older-than"),
        (["prune", "{url}", "--older-than", "soon"], "--older-than=soon: a duration such as"),
        (["prune", "{url}", "--to-size", "small"], "--to-size=small: a size such as"),
        (["prune", "{url}", "--model", "xy"], "--model xy: neither a directory nor at least 4"),
        (["prune", "{url}", "--model-revision", "r"], "--model-revision r: needs --model DIR"),
        (["prune", "{url}", "--salt", ""], "--salt: '' must not be empty"),
        (["prune", "tiered:?tiers={url}", "--to-size", "1GiB"], "give the URL of the tier"),
        (["verify", "{url}&capacty=1"], "unknown parameter 'capacty'; did you mean 'capacity'"),
        (["stats", "{url}&codec=zst"], "codec=zst: unknown 'zst'; did you mean 'zstd'"),
        (["copy", "{url}", "{url}"], "is SOURCE; give another store"),
    ],
)
def test_odd_input_is_answered_with_what_is_right(kvconnect, url, tmp_path, arguments, message):
    fill(url, [block("a")])
    code, out, err = kvconnect(*(text.format(url=url, tmp=tmp_path) for text in arguments))
    assert (code, out) == (2, "")
    assert message in err
    assert len(entries(url)) == 1


def test_a_store_that_lists_nothing_says_so(kvconnect, monkeypatch, url):
    fill(url, [block("a")])
    monkeypatch.setattr(DiskBackend, "capabilities", Capabilities())
    code, _, err = kvconnect("verify", url)
    assert code == 2
    assert "this store cannot list its blocks" in err


# ------------------------------------------------------------------------------------ a real engine


def test_what_an_engine_stored_is_found_by_its_model_revision_and_salt(kvconnect, model, url):
    named = ("--model-revision", "org/name@1")
    for options in (("--salt", "red"), ("--salt", "blue"), named):
        prompt = ("--prompt", "once " * 60, "--max-tokens", 1, "--store", url)
        assert kvconnect("generate", model, *prompt, *options)[0] == 0
    stored = entries(url)
    assert len({entry.model for entry in stored.values()}) == 2
    assert kvconnect("verify", url)[0] == 0
    for options, deleted in (
        (("--salt", "red"), len(stored) // 3),
        ((), len(stored) // 3),
        (("--model-revision", "org/name@2"), 0),
        (named, len(stored) // 3),
    ):
        _, out, _ = kvconnect("prune", url, "--model", model, *options, "--json")
        assert json.loads(out)["deleted"] == deleted, options
    assert frames(url, list(stored)) == [None] * len(stored)
