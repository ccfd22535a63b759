"""JSON as it came: bounded, and no key twice."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.server.http.body import TooManyValues, parse_json

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
        ("[" + r'"\\",[],' * 65_536 + "1]", "lists, objects and keys"),
        ("[" + "1," * (1 << 20) + "1]", "values"),
    ],
)
def test_more_than_its_size_is_for_is_refused(text, noun):
    with pytest.raises(TooManyValues, match=noun):
        parse(text)


def test_a_longer_text_may_hold_more():
    text = b"[" + b"[]," * 65_536 + b"[]]"
    assert len(parse_json(text, max_nbytes=64 * 65_538)) == 65_537


@pytest.mark.parametrize("text", ["[{:," * 70_000, '\\"[\\' * 70_000, "," * (1 << 20)])
def test_what_a_string_holds_does_not_count(text):
    assert parse(json.dumps({"prompt": text})) == {"prompt": text}


def test_what_follows_a_key_that_comes_twice_does_no_harm():
    with pytest.raises(ValueError, match="duplicate key"):
        parse('{"a": 1, "a": ' + "[" * 30_000)


@pytest.mark.parametrize("text", ["[1e5, 1.5, -0.0]", "[1e999, -1e999]", f"[{2**70}, {-(2**70)}]"])
def test_numbers_are_what_they_are(text):
    assert parse(text) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        *("NaN", "[Infinity]", "[-Infinity]", "01", "[1,]", "[1,,2]", "[1 2]", "[-]", "[1, 2"),
        *("[1]]", "\ufeff{}", '"\\ud800"', '"a\nb"', "[" * 201 + "[]" + "]" * 201, "9" * 5000),
    ],
)
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ValueError, match=r"line \d+ column \d+"):
        parse(text)


@pytest.mark.parametrize("text", [b'"\xff"', b'"\xed\xa0\x80"'])
def test_what_is_no_utf_8_is_refused(text):
    with pytest.raises(ValueError, match="code point"):
        parse_json(text, max_nbytes=1 << 20)
