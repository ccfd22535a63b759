"""prefetch: prompts that a slow tier has get into the fastest one that lasts."""

from __future__ import annotations

import json
import os
import signal

import pytest
from stored_blocks import damage, entries, fill, frames, prompt_chain

from kvconnect import PromptStore
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.errors import BadFrame
from kvconnect.keys import Namespace

PROMPT = list(range(100, 122))


@pytest.fixture
def tiers(tmp_path) -> list[str]:
    return [f"disk:{tmp_path}/{name}?capacity=8MiB" for name in ("near", "middle", "far")]


@pytest.fixture
def url(tiers) -> str:
    return f"tiered:?tiers={','.join(tiers)}"


def test_a_prompt_comes_from_every_slower_tier_and_what_is_there_is_skipped(
    kvconnect, tiers, url, tmp_path
):
    mine = prompt_chain(PROMPT)
    fill(tiers[0], mine[:1])
    fill(tiers[1], mine[:3])
    fill(tiers[2], [*mine[2:], *prompt_chain(PROMPT, namespace=Namespace("other"))])
    (tmp_path / "prompts.jsonl").write_text(json.dumps([*PROMPT, 7, 8]))
    given = ("--jsonl", tmp_path / "prompts.jsonl")
    code, out, err = kvconnect("prefetch", url, *given)
    assert code == 0, err
    assert out.startswith("copied 5 blocks, 60 KiB, 18 tokens; 2 tokens of the prompts are not")
    assert out.endswith("; 1 were there already\n")
    keys = [one.key for one in mine]
    assert entries(tiers[0]).keys() == set(keys)
    assert frames(tiers[0], keys) == [bytes(one.data.numpy()) for one in mine]
    assert entries(tiers[1]).keys() == set(keys[:3])
    found = json.loads(kvconnect("prefetch", url, *given, "--json")[1])
    assert (found["blocks"], found["present"], found["missing"]) == (0, 6, 2)
    assert found["complete"]


def test_memory_of_a_process_is_passed_over(kvconnect, tiers):
    fill(tiers[2], prompt_chain(PROMPT))
    url = f"tiered:?tiers=memory:,{tiers[0]},{tiers[2]}"
    assert kvconnect("prefetch", url, "--all")[0] == 0
    assert len(entries(tiers[0])) == 6


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("disk:{near}", "DiskBackend has no faster tier; give a tiered: store"),
        ("tiered:?tiers=memory:,disk:{near}", "no two keep blocks outside of a process's memory"),
    ],
)
def test_a_store_without_a_faster_tier_is_refused_by_name(kvconnect, tmp_path, url, why):
    code, _, err = kvconnect("prefetch", url.format(near=tmp_path / "near"), "--all")
    assert code == 2
    assert why in err


def test_a_bad_block_is_left_out_unless_another_tier_has_it(kvconnect, tiers, url, tmp_path):
    mine = prompt_chain(PROMPT)
    fill(tiers[1], mine)
    fill(tiers[2], mine[:4])
    damage(tmp_path / "middle", mine[3])
    damage(tmp_path / "middle", mine[5])
    store = PromptStore(url)
    with pytest.raises(BadFrame, match="1 bad blocks were left out"):
        store.prefetch(everything=True)
    assert entries(tiers[0]).keys() == {one.key for one in mine[:5]}


def test_nothing_matched_is_exit_code_3(kvconnect, tiers, url):
    fill(tiers[1], prompt_chain(PROMPT))
    assert kvconnect("prefetch", url, "--salt", "nobody")[0] == 3


def test_interrupted_prefetch_says_how_far_it_came_and_goes_on(kvconnect, tiers, url, monkeypatch):
    fill(tiers[1], prompt_chain(PROMPT))
    monkeypatch.setattr("kvconnect.operations.frame_reader._BATCH_BLOCKS", 2)
    plain = DiskBackend.save
    saves = []

    async def save(self, blocks):
        saves.append(blocks)
        if len(saves) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return await plain(self, blocks)

    monkeypatch.setattr(DiskBackend, "save", save)
    code, out, _ = kvconnect("prefetch", url, "--all", "--json")
    found = json.loads(out)
    assert (code, found["complete"], found["blocks"]) == (130, False, 4)
    assert len(entries(tiers[0])) == 4
    found = json.loads(kvconnect("prefetch", url, "--all", "--json")[1])
    assert (found["blocks"], found["present"], found["complete"]) == (2, 4, True)
