"""explain: what a store has of a prompt, and what stands in the way of the rest."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from stored_blocks import fill, prompt_chain

from kvconnect import LLM, ConfigurationError, KvCacheConfig, PromptStore, SamplingParams
from kvconnect.cli.main import main
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.io.identity import stored_as
from kvconnect.digest import model_digest
from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.keys import Namespace, model_tag

SIZE = 4
PROMPT = list(range(100, 122))
MODEL = b"m" * 16 + b"g" * 16
HEX = (b"m" * 16).hex()
OURS = Namespace("ours")


def chain(prompt=PROMPT, namespace=OURS, model=MODEL, **more):
    return prompt_chain(prompt, namespace=namespace, model=model, **more)


def explained(url, prompt=PROMPT, **more):
    found = PromptStore(url, HEX).explain(prompt, **{"salt": "ours"} | more)
    assert sum(map(len, found.spans)) == found.prompt_tokens == len(prompt)
    return found


def spans(found):
    return [(len(one), str(one.outcome), one.detail) for one in found.spans]


def test_all_of_it_is_stored(url):
    fill(url, chain())
    found = explained(url)
    assert spans(found) == [(21, "reused", ""), (1, "last", "")]
    (stored,) = found.stored
    assert (stored.tokens, stored.tokens_per_block, stored.differs) == (22, SIZE, ())


def test_nothing_of_it_is_stored(url):
    fill(url, chain(range(500, 520)))
    found = explained(url)
    assert spans(found) == [(21, "new", ""), (1, "last", "")]
    assert found.stored == []


def test_the_place_where_it_leaves_what_is_stored(url):
    fill(url, chain([*PROMPT[:10], 7, 8, *range(300, 310)]))
    found = explained(url)
    assert spans(found) == [(10, "reused", ""), (11, "diverged", ""), (1, "last", "")]
    assert (found.divergence.position, found.divergence.cached) == (10, (7, 8))


def test_a_first_block_that_begins_alike(url):
    fill(url, chain([*PROMPT[:2], 7, 8, *range(300, 310)]))
    assert explained(url).divergence.position == 2
    assert explained(url, [9, *PROMPT]).divergence is None


def test_the_end_of_what_is_stored_is_no_divergence(url):
    fill(url, chain(PROMPT[:12]))
    found = explained(url)
    assert spans(found) == [(12, "reused", ""), (9, "new", ""), (1, "last", "")]
    assert found.divergence is None


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ({"namespace": Namespace("theirs")}, "salt"),
        ({"namespace": Namespace()}, "salt"),
        ({"namespace": Namespace("ours", "adapter")}, "adapter"),
        ({"model": b"o" * 16 + b"g" * 16}, "model"),
        ({"model": b"o" * 16 + b"g" * 16, "namespace": Namespace("theirs")}, "model, salt"),
        ({"size": 16, "model": b"m" * 16 + b"h" * 16}, "tokens_per_block"),
    ],
)
def test_the_rest_is_stored_under_another_identity(url, other, differs):
    fill(url, [*chain(PROMPT[:8]), *chain(**other)])
    found = explained(url, tokens_per_block=SIZE)
    assert spans(found)[:2] == [(8, "reused", ""), (13, "namespace", differs)]
    assert [one.tokens for one in found.stored] == [8, 22]
    assert found.stored[1].differs == tuple(differs.split(", "))


def test_of_two_layouts_the_longer_one_counts(url):
    fill(url, [*chain(PROMPT[:8]), *chain(model=b"m" * 16 + b"h" * 16)])
    found = explained(url)
    assert [(one.tokens, one.differs) for one in found.stored] == [(22, ()), (8, ("layout",))]


def test_blocks_of_other_pool_groups_and_of_holes_do_not_count(url):
    whole = chain()
    fill(url, [*whole[:2], *whole[3:], *chain(group=1)])
    assert explained(url).stored[0].tokens == 8


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({1, 3}, [(16, "reused", ""), (5, "no_state", ""), (1, "last", "")]),
        ({1, 5}, [(21, "reused", ""), (1, "last", "")]),
        (set(), [(21, "no_state", ""), (1, "last", "")]),
    ],
)
def test_a_prompt_is_used_as_far_as_each_pool_group_has_a_block_at_the_end(url, numbers, expected):
    """Other groups are windows, which keep the ends of prompts, and states, at some of the ends."""
    states = [one for number, one in enumerate(chain(group=1)) if number in numbers]
    fill(url, [*chain(), *states, *chain(range(500, 520), group=1)])
    assert spans(explained(url)) == expected


def test_states_of_another_tenant_are_of_no_use(url):
    fill(url, [*chain(), *chain(group=1, namespace=Namespace("theirs"))])
    assert spans(explained(url)) == [(21, "no_state", ""), (1, "last", "")]


def test_a_model_is_needed(url):
    fill(url, chain())
    with pytest.raises(ConfigurationError, match="model"):
        PromptStore(url).explain(PROMPT)


def test_prompts_of_an_engine(url, tmp_path, capsys):
    """The command finds what an engine saved, and shows texts."""
    model = make_model(tmp_path / "model", "llama")
    text = "You are a clerk who works for the city. Today is {}. Answer in one sentence."
    with LLM(model, connector=url, kv_cache=KvCacheConfig(max_tokens=512)) as llm:
        llm.generate([text.format("Monday")], SamplingParams(max_tokens=1))
    command = ["explain", url, str(model), "--json"]
    assert main([*command, "--prompt", text.format("Friday")]) == 0
    found = json.loads(capsys.readouterr().out)
    at = text.index("{")
    assert found["spans"][0] == {"start": 0, "end": at, "outcome": "reused", "detail": ""}
    assert found["spans"][1]["outcome"] == "diverged"
    there = found["divergence"]
    assert there["position"] == at
    assert there["before"].endswith("Today is ")
    assert there["prompt_text"].startswith("Friday")
    assert "Monday".startswith(there["cached_text"][:6])
    assert main([*command[:-1], "--prompt", text.format("Friday"), "--salt", "me"]) == 3
    assert "other salt" in capsys.readouterr().out


def test_another_engine_and_dtype_are_named(url, tmp_path):
    model = make_model(tmp_path / "model", "llama")
    digest, config = model_digest(model), KvCacheConnectorConfig(url=url)
    mine = model_tag(stored_as(digest, config))
    theirs = model_tag(stored_as(digest, config, engine="vllm"))
    wider = [
        replace(one, data=one.data.new_zeros(2 * one.data.numel()))
        for one in chain(PROMPT[:16], model=mine + b"h" * 16)
    ]
    fill(
        url, [*chain(model=theirs + b"g" * 16), *wider, *chain(PROMPT[:8], model=mine + b"g" * 16)]
    )
    found = PromptStore(url, model).explain(PROMPT, salt="ours", tokens_per_block=SIZE)
    assert {one.differs: one.tokens for one in found.stored} == {
        (): 16,
        ("dtype",): 8,
        ("engine (vllm)",): 22,
    }
