"""drop: deleting prompts and tenants, from every tier, until nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

from stored_blocks import block, chain, entries, fill, prompt_chain

from kvconnect.backends import open_backend
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.keys import Namespace

MINE, YOURS = Namespace("mine"), Namespace("yours")
SPACES = [MINE, Namespace("mine", "adapter"), Namespace("mine", extra_key="vllm")]


def tenant(*spaces, start=1000):
    """Prompts of each namespace, under two models, with tokens that no other has."""
    return [
        one
        for at, space in enumerate(spaces)
        for number, model in enumerate((b"m" * 32, b"o" * 32))
        for one in prompt_chain(
            range(start + 100 * at + 50 * number, start + 100 * at + 50 * number + 22),
            namespace=space,
            model=model,
        )
    ]


def left_in(directory, blocks):
    """The files that hold the payload or the tokens of any of `blocks`."""
    contents = {path.name: path.read_bytes() for path in directory.iterdir()}
    return {
        name
        for name, content in contents.items()
        for one in blocks
        if bytes(one.data[:256].numpy()) in content or one.tokens.tobytes() in content
    }


def test_drop_overwrites_what_is_no_longer_listed(kvconnect, url, directory):
    """As blocks that a full store let go of: their slots keep their bytes."""
    mine = tenant(MINE)
    fill(url, [*mine, *tenant(YOURS, start=5000)])
    store = open_backend(url, raw=True)

    async def delete_all_but_one() -> None:
        await store.open([])
        await store.delete([one.key for one in mine[1:]])
        await store.close()

    asyncio.run(delete_all_but_one())
    assert left_in(directory, mine[1:])
    assert kvconnect("drop", url, "--salt", "mine")[0] == 0
    assert not left_in(directory, mine)


def test_drop_of_a_salt_leaves_no_byte_of_the_tenant_in_any_file(kvconnect, url, directory):
    mine, yours = tenant(*SPACES), tenant(YOURS, start=5000)
    fill(url, [one for pair in zip(mine, yours * 3, strict=False) for one in pair])
    assert left_in(directory, mine)
    code, out, _ = kvconnect("drop", url, "--salt", "mine", "--json")
    assert code == 0
    assert json.loads(out) == {
        "blocks": 36,
        "bytes": sum(one.data.numel() for one in mine),
        "tokens": 132,
        "missing": 0,
        "missing_keys": 0,
        "unknown": 0,
        "complete": True,
        "dry_run": False,
    }
    assert entries(url).keys() == {one.key for one in yours}
    assert not left_in(directory, mine)
    assert left_in(directory, yours)
    code, _, err = kvconnect("drop", url, "--salt", "mine")
    assert (code, err) == (3, "kvconnect: error: no block matched\n")


def test_an_engine_that_has_the_store_open_goes_on(kvconnect, url, directory, elsewhere):
    mine, yours = tenant(*SPACES), tenant(YOURS, start=5000)
    engine = DiskBackend(directory, capacity=64 << 20)
    elsewhere(engine.open([]))
    elsewhere(engine.save([*mine, *yours]))
    assert kvconnect("drop", url, "--salt", "mine")[0] == 0
    assert not left_in(directory, mine)
    assert [elsewhere(engine.lookup([one.key])) for one in yours] == [1] * len(yours)
    assert elsewhere(engine.save(mine)) == len(mine)
    elsewhere(engine.close())
    assert len(entries(url)) == len(mine) + len(yours)


KILLED = """
import os, signal, sys
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.backends.main_loop import run_to_end
from kvconnect.keys import BlockKey
async def work():
    store = DiskBackend(sys.argv[1])
    store.at = lambda point: point == "erasing" and os.kill(os.getpid(), signal.SIGKILL)
    await store.open([], "maintain")
    await store.delete([BlockKey(bytes.fromhex(key)) for key in sys.argv[2:]])
run_to_end(work())
"""


def kill_while_erasing(directory, blocks) -> None:
    keys = [one.key.hex() for one in blocks]
    done = subprocess.run([sys.executable, "-c", KILLED, directory, *keys], check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_drop_that_was_killed_leaves_nothing_once_it_is_repeated(kvconnect, url, directory):
    mine, yours = tenant(*SPACES), tenant(YOURS, start=5000)
    fill(url, [*mine, *yours])
    kill_while_erasing(directory, mine)
    assert left_in(directory, mine), "its slots are reserved, not overwritten"
    assert kvconnect("drop", url, "--salt", "mine")[0] == 3, "all rows went at once"
    assert not left_in(directory, mine)
    assert entries(url).keys() == {one.key for one in yours}


def test_slots_of_a_killed_drop_are_overwritten_before_an_engine_uses_them(url, directory):
    mine = tenant(MINE)
    fill(url, [*mine, *tenant(YOURS, start=5000)])
    kill_while_erasing(directory, mine)
    fill(url, [block("short")])
    assert not left_in(directory, mine)


def test_drop_takes_a_tenant_from_every_tier(kvconnect, tmp_path):
    tiers = [f"disk:{tmp_path}/{name}" for name in ("near", "far")]
    mine, yours = prompt_chain(range(22), namespace=MINE), prompt_chain(range(22), namespace=YOURS)
    fill(tiers[0], [*mine[:4], *yours[:2]])
    fill(tiers[1], [*mine[2:], *yours])
    code, out, _ = kvconnect("drop", f"tiered:?tiers={','.join(tiers)}", "--salt", "mine", "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["blocks"], found["tokens"]) == (8, 22)
    assert [len(entries(tier)) for tier in tiers] == [2, len(yours)]


def test_a_tier_that_does_not_answer_is_named_and_the_others_are_dropped(kvconnect, tmp_path):
    disk = f"disk:{tmp_path}/kv"
    fill(disk, prompt_chain(range(22), namespace=MINE))
    url = f"tiered:?tiers={disk},redis://127.0.0.1:1/0"
    code, out, err = kvconnect("drop", url, "--salt", "mine")
    assert code == 4
    assert "not complete" in out
    assert "redis: does not answer; what is stored there stays" in err
    assert not entries(disk)


def test_blocks_that_do_not_tell_their_tenant_are_said(kvconnect, url):
    fill(url, chain("old", 3, namespace=Namespace("mine", "adapter").encode()))
    code, _, err = kvconnect("drop", url, "--salt", "mine")
    assert code == 3
    assert "of 3 blocks that stay it is not known whose they are" in err


def test_prompts_come_from_text_files_lines_and_chats(kvconnect, url, model, tmp_path):
    text = "a prompt that is longer than a block. " * 4
    kvconnect("generate", model, "--prompt", text, "--max-tokens", "1", "--store", url)
    stored = len(entries(url))
    assert stored
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"prompt": text}) + "\n" + json.dumps([1, 2, 3]) + "\n")
    (tmp_path / "one.txt").write_text(text)
    for given in (["--prompt", text], ["--prompt-file", tmp_path / "one.txt"], ["--jsonl", lines]):
        code, out, err = kvconnect("drop", url, model, *given, "--dry-run", "--json")
        assert code == 0, err
        found = json.loads(out)
        assert found["blocks"] == stored
        assert found["missing"] == (3 if "--jsonl" in given else 0)
    assert kvconnect("drop", url, model, "--prompt", text, "--salt", "other")[0] == 3
    assert kvconnect("drop", url, model, "--prompt", text)[0] == 0
    assert not entries(url)


def test_nothing_named_is_refused(kvconnect, url):
    code, _, err = kvconnect("drop", url)
    assert code == 2
    assert "nothing says which blocks; give --prompt" in err


def test_interrupted_drop_says_how_far_it_came_and_goes_on(kvconnect, url, monkeypatch):
    fill(url, chain("a", 30, namespace=MINE.tag()))
    monkeypatch.setattr("kvconnect.operations.drop._KEYS_PER_DELETE", 10)
    deletes = []
    plain = DiskBackend.delete

    async def delete(self, keys):
        deletes.append(keys)
        if len(deletes) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        await plain(self, keys)

    monkeypatch.setattr(DiskBackend, "delete", delete)
    code, out, _ = kvconnect("drop", url, "--salt", "mine")
    assert code == 130
    assert out.startswith("dropped 10 blocks")
    assert "not complete: the same command goes on" in out
    assert 10 <= len(entries(url)) <= 20
    assert kvconnect("drop", url, "--salt", "mine")[0] == 0
    assert not entries(url)


def test_a_file_without_prompts_does_not_stand_for_a_whole_tenant(kvconnect, url, tmp_path):
    mine = tenant(*SPACES)
    fill(url, mine)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    code, _, err = kvconnect("drop", url, "--jsonl", empty, "--salt", "mine")
    assert code == 2
    assert "prompts: is empty" in err
    assert entries(url).keys() == {one.key for one in mine}
