"""Traces: what a line means, and what is refused."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import pytest

from kvconnect.errors import ConfigurationError
from kvconnect.simulate.trace_reader import TraceReader


def read(path: str, **more):
    with TraceReader(path, **more) as trace:
        return list(trace)


def line(timestamp=0, input_length=700, output_length=5, hash_ids=(0, 1), **more):
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": list(hash_ids),
        **more,
    }


def shared(left, right) -> int:
    """How many tokens two arrays begin with in common."""
    equal = left[: len(right)] == right[: len(left)]
    return len(equal) if equal.all() else int(equal.argmin())


# ---------------------------------------------------------------- what a line means


def test_lengths_and_times_are_those_of_the_line(write_trace):
    path = write_trace([line(timestamp=1000), line(timestamp=3500.5, output_length=0)])
    first, second = read(path)
    assert (first.arrival, second.arrival) == (0.0, 2.5005)
    assert (first.input_length, first.output_length, first.num_tokens) == (700, 5, 705)
    assert len(first.tokens()) == 705
    assert len(second.tokens()) == 700


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((0, 1), (0, 1), 700),  # equal ids: equal prompts, and answers that differ
        ((0, 1), (0, 2), 512),
        ((0, 1), (3, 1), 0),
        ((7, 2**40), (7, 2**40 + 1), 512),
        ((7, 2**31), (7, 2**31 + 2**32), 512),  # ids that differ beyond 32 bits
    ],
)
def test_prompts_share_as_many_tokens_as_their_ids_say(write_trace, left, right, expected):
    first, second = read(write_trace([line(hash_ids=left), line(hash_ids=right)]))
    # Ids that agree in their lower half agree in every other token, so at most in one more.
    assert 0 <= shared(first.tokens(), second.tokens()) - expected <= 1


def test_tokens_of_an_id_stand_for_nothing_else_anywhere_in_its_stretch(write_trace):
    one, two = (
        r.tokens() for r in read(write_trace([line(hash_ids=[1, 2]), line(hash_ids=[3, 4])]))
    )
    assert (one[:700:2] != two[:700:2]).all()


def test_answers_continue_where_output_hash_ids_say_so(write_trace):
    turn = line(output_length=600, hash_ids=[0, 1], output_hash_ids=[2])
    next_turn = line(input_length=1400, hash_ids=[0, 1, 2])
    first, second = read(write_trace([turn, next_turn]))
    assert shared(first.tokens(), second.tokens()) == 1300


def test_without_them_no_request_shares_an_answer(write_trace):
    turn, next_turn = line(output_length=600), line(input_length=1400, hash_ids=[0, 1, 2])
    first, second = read(write_trace([turn, next_turn]))
    assert shared(first.tokens(), second.tokens()) == 700


def test_a_last_stretch_without_an_id_is_the_requests_own(write_trace):
    first, second = read(write_trace([line(hash_ids=[0]), line(hash_ids=[0])]))
    assert shared(first.tokens(), second.tokens()) == 512


def test_the_length_of_a_stretch_can_be_given(write_trace):
    first, second = read(
        write_trace(
            [line(input_length=40, hash_ids=[0, 1, 2]), line(input_length=16, hash_ids=[0])]
        ),
        hash_tokens=16,
    )
    assert shared(first.tokens(), second.tokens()) == 16


def test_tokens_may_be_given_themselves(write_trace):
    (request,) = read(
        write_trace(
            [{"timestamp": 0, "tokens": [5, 6, 7], "output_tokens": [8], "system_length": 2}]
        )
    )
    assert request.tokens().tolist() == [5, 6, 7, 8]
    assert (request.input_length, request.output_length, request.system_length) == (3, 1, 2)


def test_with_tokens_the_answer_may_be_a_length_only(write_trace):
    (request,) = read(write_trace([{"timestamp": 0, "tokens": [5, 6, 7], "output_length": 3}]))
    assert request.tokens()[:3].tolist() == [5, 6, 7]
    assert request.num_tokens == 6


def test_fields_of_others_and_empty_lines_are_passed_over(write_trace):
    assert len(read(write_trace([line(session_id="a", priority=None), "", line()]))) == 2


def test_a_packed_trace_is_unpacked(tmp_path: Path):
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(line()) + "\n").encode() * 3))
    assert len(read(str(path))) == 3


def test_standard_input_is_a_trace_too(monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO((json.dumps(line()) + "\n").encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert len(read("-")) == 1


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("{", "line: '{' is no JSON"),
        ("[1]", "line: '[1]' must be a JSON object"),
        pytest.param("[" * 100_000, "is no JSON: ", id="deep"),
        ({"timestamp": 9}, "input_length: is missing; the line has timestamp"),
        (line(timestamp="9"), "timestamp: '9' must be milliseconds"),
        (line(timestamp=-1), "timestamp: '-1' must be milliseconds, 0 or more"),
        ('{"timestamp": NaN}', "timestamp: 'nan' must be milliseconds"),
        (line(timestamp=10**400), "must be milliseconds, 0 or more"),
        (line(timestamp=4), "timestamp: '4' is before 5 of an earlier line; sort the trace"),
        (line(timestamp=9, input_length=0), "input_length: '0' must be a whole number"),
        (line(timestamp=9, input_length=True), "input_length: 'True' must be a whole number"),
        (line(timestamp=9, input_length=7.5), "input_length: '7.5' must be a whole number"),
        (line(timestamp=9, output_length=-1), "output_length: '-1' must be a whole number"),
        (line(timestamp=9, output_length=10**12), "output_length: '1000000000000' must be"),
        (line(timestamp=9, hash_ids=[0]) | {"hash_ids": 5}, "hash_ids: '5' must be a list"),
        (line(timestamp=9, hash_ids=[0, -1]), "hash_ids: '[0, -1]' must be a list of whole"),
        (line(timestamp=9, hash_ids=[0, 1.5]), "hash_ids: '[0, 1.5]' must be"),
        (line(timestamp=9, hash_ids=[0, "a"]), "hash_ids: \"[0, 'a']\" must be"),
        (line(timestamp=9, hash_ids=[0, [1]]), "hash_ids: '[0, [1]]' must be"),
        (line(timestamp=9, hash_ids=[0, 2**63]), "hash_ids: '[0, 9223372036854775808]' must be"),
        (line(timestamp=9, hash_ids=[]), "hash_ids: '0 ids' must be 2, one per 512 tokens"),
        (line(timestamp=9, hash_ids=[0, 1, 2]), "hash_ids: '3 ids' must be 2, one per 512 tokens"),
        (line(timestamp=9, output_hash_ids=[2]), "output_hash_ids: '1 ids' must be 0"),
        (line(timestamp=9, system_length=701), "system_length: '701' is beyond the prompt of 700"),
        ({"timestamp": 9, "tokens": []}, "tokens: '[]' must be at least one token"),
        ({"timestamp": 9, "tokens": [1, 2**40], "output_length": 0}, "tokens: token id"),
        ({"timestamp": 9, "tokens": [1], "output_tokens": 4}, "output_tokens: '4' must be a list"),
        (
            {"timestamp": 9, "tokens": [1], "output_length": 0, "input_length": 2},
            "input_length: '2' there are 1 tokens",
        ),
    ],
)
def test_a_bad_line_is_named_with_field_value_and_remedy(write_trace, bad, complaint):
    path = write_trace([line(timestamp=5), "", bad])
    with pytest.raises(ConfigurationError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert complaint in str(error.value)


def test_a_missing_trace_is_named():
    with pytest.raises(ConfigurationError, match=r"trace 'nowhere.jsonl': No such file"):
        TraceReader("nowhere.jsonl")


def test_a_damaged_packed_trace_is_refused(tmp_path: Path):
    path = tmp_path / "trace.jsonl.gz"
    packed = gzip.compress((json.dumps(line()) + "\n").encode() * 99)
    middle = len(packed) // 2
    for damaged in (packed[:-10], packed[:middle] + b"\xff" * 9 + packed[middle + 9 :]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigurationError, match="not a whole gzip file"):
            read(str(path))


@pytest.mark.parametrize("hash_tokens", [0, 1, 15])
def test_stretches_of_odd_length_are_refused(write_trace, hash_tokens):
    with pytest.raises(ConfigurationError, match="must be even"):
        TraceReader(write_trace([]), hash_tokens=hash_tokens)


def test_an_answer_of_given_tokens_is_made_when_it_is_asked_for(write_trace):
    path = write_trace([{"timestamp": 0, "tokens": [1, 2], "output_length": 2**31 - 1}])
    with TraceReader(path) as reader:
        (request,) = reader
    assert request.num_tokens == 2**31 + 1
    assert request.content.nbytes == 8
