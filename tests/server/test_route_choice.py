"""Which server a request goes to, as far as that can be told without servers."""

from __future__ import annotations

import asyncio
import json

import httpx2
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from kvconnect.errors import ConfigurationError
from kvconnect.server.route.fleet import Fleet
from kvconnect.server.route.instance import InstanceFailed
from kvconnect.server.route.opened import begin
from kvconnect.server.route.prompt import HeldPrefixes, Prompt
from kvconnect.server.route.settings import RouteSettings

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def settings(**fields):
    return RouteSettings(**({"decode": ("http://d0", "http://d1")} | fields))


def fleet(**fields):
    return Fleet(settings(prefill=("http://p0", "http://p1"), **fields))


def of_text(text, **more):
    return Prompt.of(COMPLETIONS, {"prompt": text} | more)


def choose(servers, text, role="prefill", but=()):
    return servers.choose(role, of_text(text), but).instance


# ------------------------------------------------------------------------------ prompts


@examples(max_examples=30)
@given(JSON, JSON)
def test_any_body_has_a_prompt(prompt, messages):
    Prompt.of(COMPLETIONS, {"prompt": prompt})
    Prompt.of(CHATS, {"messages": messages})


@given(st.text(max_size=2000), st.text(max_size=2000))
def test_prompts_share_the_pieces_that_they_share(one, other):
    common = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    common = min(len(one), len(other)) if common is None else common
    held = HeldPrefixes(1000)
    held.add(of_text(one).prefixes)
    assert held.matched(of_text(other).prefixes) == common // 256


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=300), st.integers(0, 300))
def test_token_ids_are_counted_by_64(tokens, cut):
    held = HeldPrefixes(1000)
    held.add(of_text(tokens).prefixes)
    assert held.matched(of_text([*tokens[:cut], -1]).prefixes) == min(cut, len(tokens)) // 64
    assert of_text(tokens).num_pieces == -(-len(tokens) // 64)


def test_a_chat_goes_on_from_its_last_turn():
    turns = [{"role": "user", "content": "x" * 2000}]
    before = Prompt.of(CHATS, {"messages": turns})
    after = Prompt.of(CHATS, {"messages": [*turns, {"role": "assistant", "content": "y" * 900}]})
    held = HeldPrefixes(1000)
    held.add(before.prefixes)
    assert held.matched(after.prefixes) == len(before.prefixes)


@pytest.mark.parametrize("other", [{"cache_salt": "a"}, {"model": "b"}])
def test_nothing_is_shared_across_salts_and_models(other):
    assert not set(of_text("x" * 1000).prefixes) & set(of_text("x" * 1000, **other).prefixes)


def test_a_long_prompt_is_hashed_up_to_a_limit():
    prompt = of_text("x" * (1 << 20))
    assert (len(prompt.prefixes), prompt.num_pieces) == (2048, 4096)


def test_several_prompts_are_not_one():
    assert of_text(["a"]).single
    assert of_text([1, 2]).single
    assert not of_text(["a", "b"]).single
    assert not of_text([[1], [2]]).single


@given(st.lists(st.lists(st.binary(min_size=1, max_size=2), max_size=8), max_size=20))
def test_what_is_held_is_bounded_and_the_last_is_held_from_its_start(chains):
    held = HeldPrefixes(4)
    for chain in chains:
        unique = list(dict.fromkeys(chain))
        held.add(unique)
        assert len(held) <= 4
        assert held.matched(unique) == min(4, len(unique))


# ------------------------------------------------------------------------------ servers


def test_a_prompt_goes_to_the_server_that_holds_its_beginning():
    servers = fleet()
    first = {name: choose(servers, name * 1000) for name in "abcdef"}
    assert len(set(first.values())) == 2, "new ones are spread"
    for name in "fedcba":
        assert choose(servers, name * 1000 + "!") is first[name]


def test_a_server_that_has_much_to_do_is_passed_by():
    servers = fleet()
    holder = choose(servers, "a" * 1000)
    with holder.loaded(34):
        assert choose(servers, "a" * 1000) is holder, "it has 3 pieces less to compute"
    with holder.loaded(37):
        assert choose(servers, "a" * 1000) is not holder


def test_what_failed_or_is_down_is_not_chosen():
    servers = fleet()
    one, other = servers.prefill
    assert choose(servers, "a", but=[one]) is other
    one.drains("it ends")
    assert choose(servers, "a") is other
    assert servers.choose("prefill", of_text("a"), [other]) is None


def test_decode_servers_share_the_requests():
    servers = fleet()
    first = choose(servers, "a" * 1000, "decode")
    with first.loaded(16):
        assert choose(servers, "a" * 1000, "decode") is not first


async def test_what_waits_for_a_server_is_told_when_it_goes_down():
    (one, _) = fleet().prefill
    one.prefixes.add([b"x"])

    async def wait():
        async with one.answering(asyncio.get_running_loop().time() + 60):
            await asyncio.sleep(60)

    waiting = [asyncio.create_task(wait()) for _ in range(3)]
    await asyncio.sleep(0)
    one.went_down("it is gone")
    for task in waiting:
        with pytest.raises(InstanceFailed, match="prefill 0: it is gone"):
            await task
    assert len(one.prefixes) == 0
    with pytest.raises(InstanceFailed):
        await wait()
    one.came_up()
    with pytest.raises(InstanceFailed, match="in time") as late:
        async with one.answering(asyncio.get_running_loop().time() + 0.01):
            await asyncio.sleep(60)
    assert late.value.outcome == "late"


def test_an_engine_that_started_again_holds_nothing():
    (one, _) = fleet().prefill
    one.prefixes.add([b"x"])
    one.told("first", ("h", 1))
    one.told("first", None)
    assert (len(one.prefixes), one.address) == (1, ("h", 1))
    one.told("second", ("h", 2))
    assert (len(one.prefixes), one.address) == (0, ("h", 2))


# ------------------------------------------------------------------------------ answers


def event(**content):
    return b"data: " + json.dumps(content).encode() + b"\n\n"


ROLE = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
TOKEN = event(choices=[{"delta": {"content": "x"}}])
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("events", "held"),
    [
        ([ROLE, ROLE, TOKEN, TOKEN, DONE], 3),
        ([event(choices=[{"text": "x"}]), DONE], 1),
        ([ROLE, event(error={"message": "x"}), DONE], 2),
        ([event(choices=[], usage={}), DONE], 1),
        ([ROLE, DONE], 2),
        ([], 0),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_stream_begins_with_its_first_token(events, held, size):
    data = b"".join(events)

    async def pieces():
        for one in (
            events if size == 1000 else [data[i : i + size] for i in range(0, len(data), size)]
        ):
            yield one

    response = httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=pieces())
    opened = await begin(None, response)
    assert opened.beginning.startswith(b"".join(events[:held]))
    assert len(opened.beginning) < len(b"".join(events[:held])) + size or size == 1000
    assert opened.error_event == any(b'"error"' in one for one in events)
    rest = b"".join([piece async for piece in opened.rest])
    assert opened.beginning + rest == data


# ------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"decode": ()}, "decode"),
        ({"decode": ("localhost:8000",)}, "decode.*number 1"),
        ({"decode": ("http://a", "http://u:p4ss@b")}, "decode.*number 2"),
        ({"decode": ("http://a/v2",)}, "has a path"),
        ({"decode": ("http://a", "http://a/v1")}, "named twice"),
        ({"router_secret": "two words"}, "router_secret"),
        ({"instance_api_key": "ä"}, "instance_api_key"),
        ({"request_timeout_s": 0}, "request_timeout_s"),
    ],
)
def test_a_wrong_setting_is_named(fields, named):
    with pytest.raises(ConfigurationError, match=named) as raised:
        settings(**fields)
    assert "p4ss" not in str(raised.value)


async def test_a_stream_that_never_begins_is_not_collected_without_end():
    async def pieces():
        while True:
            yield ROLE * 100

    response = httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=pieces())
    opened = await begin(None, response)
    assert (1 << 20) < len(opened.beginning) < (2 << 20)
