"""Which blocks of a store belong to a prompt."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_blocks import entries, fill, prompt_chain

from kvconnect import ConfigurationError, PromptStore
from kvconnect.backend import StoredEntry
from kvconnect.backends.guard.encryption import Cipher
from kvconnect.backends.url import without_codec
from kvconnect.keys import Namespace
from kvconnect.operations.choice import _Finder
from kvconnect.operations.which import Wanted, WantedPrompt, tenant

PROMPT = list(range(100, 122))


def keys_of(blocks):
    return {one.key for one in blocks}


def dropped(url, **which):
    """The keys that a drop takes away, and its result."""
    before = entries(url)
    done = PromptStore(url, which.pop("model", None)).drop(**which)
    assert done.complete
    gone = before.keys() - entries(url).keys()
    assert done.blocks == len(gone)
    assert done.bytes == sum(before[key].nbytes for key in gone)
    return gone, done


def test_a_prompt_is_found_in_every_geometry_group_and_share(url):
    mine = [
        *prompt_chain(PROMPT),
        *prompt_chain(PROMPT, size=16, model=b"m" * 16 + b"g" * 16),
        *prompt_chain(PROMPT, group=1),
        *prompt_chain(PROMPT, shard=1),
    ]
    fill(url, [*mine, *prompt_chain([7, *PROMPT]), *prompt_chain(PROMPT[4:])])
    gone, done = dropped(url, prompts=[PROMPT])
    assert gone == keys_of(mine)
    assert done.missing == 0


def test_a_model_s_digits_limit_a_prompt_to_that_model(url):
    mine, other = prompt_chain(PROMPT), prompt_chain(PROMPT, model=b"o" * 32)
    fill(url, [*mine, *other])
    gone, _ = dropped(url, model=(b"o" * 4).hex(), prompts=PROMPT)
    assert gone == keys_of(other)


def test_a_prompt_without_a_salt_is_nobody_s_and_with_one_that_tenant_s(url):
    spaces = {salt: prompt_chain(PROMPT, namespace=Namespace(salt)) for salt in (None, "a", "b")}
    for blocks in spaces.values():
        fill(url, blocks)
    for salt in ("a", None):
        gone, _ = dropped(url, prompts=[PROMPT], salt=salt)
        assert gone == keys_of(spaces[salt])
    fill(url, [*spaces["a"], *spaces[None]])
    gone, _ = dropped(url, prompts=[PROMPT, PROMPT], salt=["b", None])
    assert gone == keys_of([*spaces["b"], *spaces[None]])


def test_an_adapter_is_told_apart(url):
    mine = prompt_chain(PROMPT, namespace=Namespace("a", "adapter"))
    fill(url, [*mine, *prompt_chain(PROMPT, namespace=Namespace("a"))])
    gone, _ = dropped(url, prompts=[PROMPT], salt="a", lora="adapter")
    assert gone == keys_of(mine)


def test_what_is_not_stored_of_a_prompt_counts_as_missing(url):
    fill(url, prompt_chain(PROMPT[:10]))
    gone, done = dropped(url, prompts=[[*PROMPT[:8], 1, 2, 3]])
    assert (len(gone), done.tokens, done.missing) == (2, 8, 3)
    gone, done = dropped(url, prompts=[PROMPT])
    assert (done.blocks, done.missing) == (0, len(PROMPT)), "its beginning is gone"


def test_the_end_of_a_prompt_is_found_though_its_beginning_is_not_stored(url):
    """A pool group with a window keeps only the end."""
    long = list(range(500, 540))
    end = prompt_chain(long, size=8, group=1)[3:]
    fill(url, end)
    gone, done = dropped(url, prompts=[long])
    assert gone == keys_of(end)
    assert done.missing == len(long)


def test_continued_takes_what_follows_and_nothing_else_does(url):
    whole = prompt_chain(PROMPT)
    fill(url, whole)
    gone, _ = dropped(url, prompts=[PROMPT[:8]])
    assert gone == keys_of(whole[:2])
    fill(url, whole[:2])
    gone, _ = dropped(url, prompts=[PROMPT[:8]], continued=True)
    assert gone == keys_of(whole)
    fill(url, whole)
    gone, _ = dropped(url, keys=[whole[3].key.hex()[:16]], continued=True)
    assert gone == keys_of(whole[3:])


@pytest.mark.parametrize("by", ["prompt", "key"])
def test_continued_takes_windows_and_states_that_nothing_stored_leads_to(by, url):
    """They are those of the ends of prompts, far behind the wanted beginning."""
    long = [*range(500, 532), *range(900, 932)]
    keys, end = prompt_chain(long, size=8), prompt_chain(long, size=8, group=1)[5:7]
    others = [
        *prompt_chain(long, size=8, group=1, namespace=Namespace("a"))[5:],
        *prompt_chain(long, size=8, group=1, model=b"o" * 32)[5:],
        *prompt_chain([*long[:32], *range(700, 732)], size=8, group=1, namespace=Namespace("a")),
    ]
    fill(url, [*keys, *end, *others])
    which = {"prompts": [long[:16]]} if by == "prompt" else {"keys": [keys[0].key.hex()[:16]]}
    more = {"model": (b"m" * 4).hex()} if by == "prompt" else {}
    gone, _ = dropped(url, continued=True, **which, **more)
    assert gone == keys_of([*keys, *end])


def test_keys_are_hexadecimal_digits_of_one_block(url):
    blocks = prompt_chain(PROMPT)
    fill(url, blocks)
    gone, done = dropped(url, keys=[blocks[2].key.hex()[:16].upper(), "0" * 16])
    assert gone == {blocks[2].key}
    assert done.missing_keys == 1
    with pytest.raises(ConfigurationError, match="'abc' is no key; give 8 to 64"):
        PromptStore(url).drop(keys=["abc"])


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ({}, "nothing says which blocks"),
        ({"everything": True, "salt": "a"}, "everything: give nothing else"),
        ({"prompts": [[1]], "keys": ["a" * 8]}, "prompts or keys, not both"),
        ({"prompts": [], "salt": "a"}, "prompts: is empty"),
        ({"keys": [], "salt": "a"}, "keys: is empty"),
        ({"keys": ["a" * 8], "salt": "a"}, "neither a salt nor an adapter"),
        ({"salt": ["a", "b"]}, "there are no prompts"),
        ({"salt": ["a", "b"], "prompts": [[1]]}, "2 were given for 1"),
        ({"salt": ""}, "must not be empty"),
        ({"prompts": ["text"]}, "text needs a model directory"),
        ({"prompt": [1]}, "prompt: unknown"),
    ],
)
def test_a_wrong_argument_is_refused_before_the_store_is_opened(which, message):
    with pytest.raises(ConfigurationError, match=message):
        PromptStore("disk:/nowhere").drop(**which)


def test_all_of_a_model_and_all(url):
    mine, other = prompt_chain(PROMPT), prompt_chain(PROMPT, model=b"o" * 32)
    fill(url, [*mine, *other])
    gone, _ = dropped(url, model=(b"o" * 4).hex(), everything=True)
    assert gone == keys_of(other)
    gone, done = dropped(url, everything=True)
    assert gone == keys_of(mine)
    assert (done.tokens, done.unknown) == (len(PROMPT), 0)


async def test_it_works_where_an_event_loop_runs_and_on_other_threads(url):
    blocks = prompt_chain(PROMPT)
    await asyncio.to_thread(fill, url, blocks)
    drop = PromptStore(url).drop
    assert drop(prompts=[PROMPT], dry_run=True).blocks == len(blocks)
    assert (await asyncio.to_thread(drop, prompts=[PROMPT])).blocks == len(blocks)


def test_encrypted_tokens_are_read_with_the_key_of_the_url(tmp_path, url):
    (tmp_path / "key").write_bytes(b"k" * 32)
    cipher = Cipher.from_file(str(tmp_path / "key"))
    blocks = prompt_chain(PROMPT)
    secret = [
        replace(one, tokens=cipher.encrypt_tokens(one.tokens, one.key, one.parent))
        for one in blocks
    ]
    fill(url, secret)
    _, done = dropped(url, prompts=[PROMPT])
    assert done.missing == len(PROMPT)
    keyed = f"{url}&codec=aes-gcm&key_file={tmp_path}/key"
    assert without_codec(keyed) == url
    assert PromptStore(keyed).drop(prompts=[PROMPT]).tokens == len(PROMPT)
    assert not entries(url)


@given(st.data())
def test_the_chosen_are_those_that_a_plain_search_finds(data):
    """Random prompts of few tokens, so that they share beginnings and repeat themselves."""
    prompt = st.lists(st.integers(1, 2), max_size=12)
    stored = data.draw(st.lists(prompt, max_size=6))
    wanted = data.draw(st.lists(prompt, max_size=3))
    blocks = {one.key: one for tokens in stored for one in prompt_chain(tokens)}
    ends = {  # of each block, the whole prompt up to it
        one.key: tuple(tokens[: 4 * at + 4])
        for tokens in stored
        for at, one in enumerate(prompt_chain(tokens))
    }
    chosen = tenant(None, None, None, named=True)
    arrays = [np.array(tokens, np.int32) for tokens in wanted]
    finder = _Finder(
        Wanted(prompts=tuple(WantedPrompt(one, chosen) for one in arrays)),
        lambda entry: entry.tokens,
    )
    for key in data.draw(st.permutations(sorted(blocks))):
        one = blocks[key]
        finder.add(
            StoredEntry(key, 1, 1, 0, 0, one.parent, one.tokens, one.namespace, one.model, 0)
        )
    found = finder.chosen()
    expected = {
        key for key, end in ends.items() if any(end == tuple(one[: len(end)]) for one in wanted)
    }
    if wanted:
        assert set(found.keys) == expected
    for key in found.keys:
        before = found.keys[: found.keys.index(key)]
        assert blocks[key].parent in before or blocks[key].parent not in found.keys
