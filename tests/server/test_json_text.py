"""JSON as it came: bounded, and no key twice."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.server.http import json_text
from kvconnect.server.http.json_text import TooManyValues, parse_json

_TEXTS = st.text(alphabet='ab"\\\\[]{}:,\u00e9')
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXTS,
    lambda inside: st.lists(inside) | st.dictionaries(_TEXTS, inside),
)


def parse(text: str) -> object:
    return parse_json(text.encode(), max_nbytes=1 << 20)


@settings(deadline=None, max_examples=50)
@given(_VALUES, st.booleans())
def test_every_value_is_read_as_it_is(value, ascii_only):
    assert parse(json.dumps(value, ensure_ascii=ascii_only)) == value


@settings(deadline=None, max_examples=50)
@given(_VALUES, st.lists(_TEXTS, min_size=1, unique=True), st.data())
def test_a_key_twice_in_an_object_is_named_wherever_it_is(value, keys, data):
    twice = data.draw(st.sampled_from(keys))
    pairs = [*keys, twice]
    repeated = "{" + ",".join(f"{json.dumps(key)}: {json.dumps(value)}" for key in pairs) + "}"
    with pytest.raises(ValueError, match="is there twice"):
        parse(f'[{json.dumps(value)}, {{"x": [{repeated}]}}]')


def test_the_same_key_in_two_objects_is_fine():
    assert parse('[{"a": {"a": 1}}, {"a": 2}]') == [{"a": {"a": 1}}, {"a": 2}]


@pytest.mark.parametrize(
    ("text", "noun"),
    [
        ("[" + "[]," * 65_536 + "[]]", "lists, objects and keys"),
        ("[" + '{"":0},' * 32_768 + "1]", "lists, objects and keys"),
        ("[" + "1," * (1 << 20) + "1]", "values"),
    ],
)
def test_more_than_its_size_is_for_is_refused(text, noun):
    with pytest.raises(TooManyValues, match=noun):
        parse(text)


def test_a_longer_text_may_hold_more():
    text = b"[" + b"[]," * 65_536 + b"[]]"
    assert len(parse_json(text, max_nbytes=64 * 65_538)) == 65_537


# -------------------------------------------------------------------- lists of integers, in pieces


_NUMBERS = st.lists(st.integers(-(2**70), 2**70), max_size=40)
_NUMBERS_AND_MORE = st.recursive(
    _NUMBERS | _TEXTS | st.floats(allow_nan=False, allow_infinity=False),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(_TEXTS, inside, max_size=3),
    max_leaves=6,
)
_SPACED = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n\t", ":\r ")])


@pytest.fixture(scope="module")
def short_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "_LONG_LIST_NBYTES", 8)
        patch.setattr(json_text, "_PIECE_NBYTES", 5)
        patch.setattr(json_text, "_BEGINNING", re.compile(rb"\[[0-9\-, \t\r\n]{7}"))
        patch.setattr(json_text, "_WINDOW_NBYTES", 3)
        yield


@settings(deadline=None, max_examples=100)
@given(_NUMBERS_AND_MORE, _NUMBERS_AND_MORE, _SPACED)
def test_lists_that_are_read_in_pieces_are_what_they_are(short_pieces, value, other, separators):
    text = json.dumps([value, json.dumps(value), {"x": other, "y": "[1,2,3,4,5,6,7,8"}])
    respaced = json.dumps(json.loads(text), separators=separators)
    assert parse(respaced) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        *("[1,2,3,4,5,]", "[,1,2,3,4,5]", "[1,2,,3,4,5]", "[1,2,3 4,5,6]", "[1,2,03,4,5]"),
        *(
            "[1,-,2,3,4]",
            "[1,2,3,4,5,6",
            "[        ,       ]",
            "[1,2,3,4,5,6]]",
            "[1,2,3,4,5 ,   ]",
        ),
    ],
)
def test_what_is_no_list_of_integers_is_refused_in_pieces_too(short_pieces, text):
    with pytest.raises(ValueError, match=r"column|missing"):
        parse(text)


@pytest.mark.parametrize("text", ["[            ]", "[ 1,2,3,4,5,6,7 ]", '"[1,2,3,4,5,6,7]"'])
def test_space_and_strings_are_no_numbers(short_pieces, text):
    assert parse(text) == json.loads(text)


def test_a_long_list_is_never_read_at_once(monkeypatch):
    lengths = []
    read = json_text.from_json
    monkeypatch.setattr(
        json_text, "from_json", lambda text, **how: lengths.append(len(text)) or read(text, **how)
    )
    prompts = [list(range(300_000)), ["text"], list(range(200_000))]
    text = json.dumps({"prompt": prompts, "note": str(prompts)[:400_000]})
    assert parse(text) == json.loads(text)
    assert sorted(lengths)[-2] < 40_000  # but the string is


def test_brackets_of_a_string_cost_no_step_each(monkeypatch):
    steps = []
    monkeypatch.setattr(json_text, "_end_of_numbers", lambda *_: steps.append(1))
    text = "[" * 500_000 + "[1,2]" * 1000
    assert parse(json.dumps({"prompt": text})) == {"prompt": text}
    assert not steps
