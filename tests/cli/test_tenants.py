"""stats --by tenant: who uses how much of a store."""

from __future__ import annotations

import json

import pytest
import torch
from stored_blocks import NBYTES, block, chain, fill, prompt_chain

from kvconnect import PromptStore
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.keys import Namespace, salt_tag

A, B = Namespace("a"), Namespace("b", "adapter")


def load(url, blocks, elsewhere):
    store = DiskBackend(url.removeprefix("disk:").partition("?")[0])
    elsewhere(store.open([]))
    buffers = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in blocks]
    assert elsewhere(store.load([one.key for one in blocks], buffers)) == len(blocks)
    elsewhere(store.close())


@pytest.fixture
def two_tenants(url, elsewhere):
    a, b = prompt_chain(range(14), namespace=A), prompt_chain(range(8), namespace=B)
    fill(url, [*a, *b, block("none", namespace=Namespace().tag(), group=0), *chain("old", 3)])
    load(url, a, elsewhere)
    load(url, a[:2], elsewhere)


def row(digest, blocks, hits, saved, name=None):
    return {
        "digest": digest and digest.hex(),
        "name": name,
        "blocks": blocks,
        "bytes": blocks * NBYTES,
        "hits": hits,
        "tokens_saved": saved,
    }


def test_each_tenants_blocks_bytes_hits_and_tokens(kvconnect, url, two_tenants, tmp_path):
    names = tmp_path / "names.json"
    names.write_text(json.dumps({salt_tag("b").hex(): "Bertram & Co"}))
    code, out, _ = kvconnect("stats", url, "--by", "tenant", "--tenants", names, "--json")
    assert code == 0
    expected = [
        row(salt_tag("a"), 4, 6, 14 + 8),
        row(None, 3, 0, 0),
        row(salt_tag("b"), 2, 0, 0, "Bertram & Co"),
        row(salt_tag(None), 1, 0, 0, "(no salt)"),
    ]
    assert json.loads(out) == {"tenants": expected}
    code, out, _ = kvconnect("stats", url, "--by", "tenant", "--tenants", names)
    lines = [line.split() for line in out.splitlines()]
    assert lines[1] == [salt_tag("a").hex(), "4", "48", "KiB", "6", "22"]
    assert lines[2][0] == "(unknown)"
    assert lines[3][:3] == ["Bertram", "&", "Co"]
    found = PromptStore(url).tenants({salt_tag("b"): "Bertram & Co"})
    assert [one.as_json() for one in found] == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ("[]", "a JSON object is needed"),
        ('{"tenant-7": "x"}', "'tenant-7': give the 32 hexadecimal digits"),
        (json.dumps({"ab" * 16: 5}), "and a name"),
        (json.dumps({"ab" * 16: "\x1b[2J"}), "and a name"),
    ],
)
def test_names_that_are_none(kvconnect, url, two_tenants, tmp_path, content, said):
    names = tmp_path / "names.json"
    if content is not None:
        names.write_text(content)
    code, _, err = kvconnect("stats", url, "--by", "tenant", "--tenants", names)
    assert code == 2
    assert said in err


@pytest.mark.parametrize("given", [["--tenants", "x"], ["--by", "tenant", "--quick"]])
def test_options_that_need_each_other(kvconnect, url, given):
    code, _, err = kvconnect("stats", url, *given)
    assert (code, "--by tenant" in err) == (2, True)
