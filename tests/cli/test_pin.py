"""pin, unpin: prompts that a store keeps, and how ls, stats and prune show them."""

from __future__ import annotations

import json
import time

import pytest
from stored_blocks import NBYTES, block, chain, entries, fill, prompt_chain

from kvconnect import ConfigurationError, PromptStore
from kvconnect.backend import Capabilities
from kvconnect.backends.disk.store import DiskBackend

PROMPT = list(range(100, 122))
MORE_THAN_FITS = (1 << 20) // NBYTES + 5


@pytest.fixture
def url(tmp_path) -> str:
    return f"disk:{tmp_path}/kv?capacity=1MiB"


@pytest.fixture
def lines(tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps(PROMPT))
    return tmp_path / "prompts.jsonl"


def test_a_pinned_prompt_survives_other_traffic_and_a_restart(kvconnect, url, lines):
    mine = prompt_chain(PROMPT)
    fill(url, [*mine, *chain("other", 3)])
    code, out, err = kvconnect("pin", url, "--jsonl", lines)
    assert (code, out) == (0, "pinned 6 blocks, 72 KiB, 22 tokens\n"), err
    fill(url, [block(("press", number)) for number in range(MORE_THAN_FITS)])
    left = entries(url)
    assert {one.key for one in mine} <= left.keys()
    assert not {one.key for one in chain("other", 3)} & left.keys()
    assert kvconnect("unpin", url, "--jsonl", lines)[0] == 0
    code, _, err = kvconnect("unpin", url, "--jsonl", lines)
    assert (code, err) == (3, "kvconnect: error: no pinned block matched\n")
    fill(url, [block(("more", number)) for number in range(MORE_THAN_FITS)])
    assert not {one.key for one in mine} & entries(url).keys()


def test_ls_and_stats_show_pins_and_prune_leaves_them(kvconnect, url):
    mine, other = prompt_chain(PROMPT), chain("other", 2)
    fill(url, [*mine, *other])
    assert kvconnect("pin", url, "--key", mine[1].key.hex()[:16], "--for", "7d")[0] == 0
    assert kvconnect("pin", url, "--key", mine[0].key.hex())[0] == 0
    listed = {
        found["key"]: (found["pinned"], found["pinned_until"])
        for found in map(json.loads, kvconnect("ls", url, "--json")[1].splitlines())
    }
    assert listed[mine[0].key.hex()] == (True, None)
    pinned, until = listed[mine[1].key.hex()]
    assert pinned
    assert abs(until - time.time() - 7 * 86400) < 3600
    assert listed[mine[2].key.hex()] == (False, None)
    _, out, _ = kvconnect("ls", url)
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert " yes " in rows[mine[0].key.hex()[:16]]
    assert " 6d " in rows[mine[1].key.hex()[:16]]
    _, out, _ = kvconnect("stats", url, "--quick")
    assert "pinned_blocks            2\n" in out
    assert "pinned_bytes             24 KiB\n" in out
    code, out, err = kvconnect("prune", url, "--to-size", "0")
    assert code == 0
    assert "2 pinned blocks stay; 'drop' deletes them, too" in err
    assert entries(url).keys() == {one.key for one in mine[:2]}
    assert kvconnect("drop", url, "--all")[0] == 0
    assert not entries(url)


def test_what_has_no_room_in_the_share_is_not_pinned_and_that_is_said(kvconnect, url):
    fill(url, prompt_chain(range(1000, 1200)))
    code, out, err = kvconnect("pin", url, "--all", "--json")
    found = json.loads(out)
    assert code == 1
    assert found["blocks"] + found["refused"] == 50
    assert 0 < found["bytes"] <= (1 << 20) // 2
    assert f"{found['refused']} blocks are not pinned" in err
    pinned = [one for one in entries(url).values() if one.pinned_until]
    assert all(one.parent in {two.key for two in pinned} for one in pinned[1:]), "beginnings"


def test_a_tier_that_can_pin_does(kvconnect, tmp_path):
    tiers = f"tiered:?tiers=disk:{tmp_path}/near,disk:{tmp_path}/far"
    fill(f"disk:{tmp_path}/near", prompt_chain(PROMPT)[:2])
    fill(f"disk:{tmp_path}/far", prompt_chain(PROMPT))
    code, out, _ = kvconnect("pin", tiers, "--all", "--json")
    found = json.loads(out)
    assert (code, found["blocks"], found["tokens"]) == (0, 8, 22)


def test_a_store_without_pins_is_refused_by_name(kvconnect, url, monkeypatch):
    fill(url, prompt_chain(PROMPT))
    monkeypatch.setattr(DiskBackend, "capabilities", Capabilities(enumerable=True))
    code, _, err = kvconnect("pin", url, "--all")
    assert code == 2
    assert "DiskBackend cannot pin blocks; disk, memory and Redis stores can" in err


def test_a_time_that_is_over_is_refused(url):
    for wrong in (0, -1, float("nan")):
        with pytest.raises(ConfigurationError, match="must be above 0 seconds"):
            PromptStore(url).pin(for_s=wrong, everything=True)
