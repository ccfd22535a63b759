"""Token ids are checked at the edge and int32 inside."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import ConfigurationError
from kvconnect.tokens import LateTokens, TokenBuffer, as_token_array

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(INT32))
def test_any_int32_list_round_trips(tokens):
    array = as_token_array(tokens)
    assert array.dtype == np.int32
    assert array.tolist() == tokens


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_arrays_of_other_integers_are_converted(dtype):
    assert as_token_array(np.array([1, 2, 3], dtype)).tolist() == [1, 2, 3]


def test_an_int32_array_is_not_copied():
    array = np.arange(5, dtype=np.int32)
    assert np.shares_memory(as_token_array(array), array)


def test_a_strided_view_comes_out_contiguous():
    array = as_token_array(np.arange(10, dtype=np.int32)[::2])
    assert array.flags.c_contiguous
    assert array.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        ([2**31], "2147483648 is outside int32"),
        ([-(2**31) - 1], "-2147483649 is outside int32"),
        ([2**70], "outside int64"),
        ([1.5], "integers are needed"),
        (["a"], "integers are needed"),
        ([True], "integers are needed"),
        ([[1, 2], [3, 4]], "one dimension"),
        ([[1], [2, 3]], "not a flat sequence"),
    ],
)
def test_what_is_no_token_list_is_refused_by_name(tokens, complaint):
    with pytest.raises(ConfigurationError, match=complaint) as caught:
        as_token_array(tokens, field="prompt")
    assert str(caught.value).startswith("prompt: ")


@given(st.lists(INT32), st.lists(st.lists(INT32, max_size=5), max_size=20))
def test_a_buffer_is_what_was_appended_and_leaves_the_given_array_alone(prompt, pieces):
    given_array = np.array(prompt, np.int32)
    buffer = TokenBuffer(given_array)
    for piece in pieces:
        buffer.extend(np.array(piece, np.int32))
    assert buffer.view.tolist() == prompt + [token for piece in pieces for token in piece]
    assert len(buffer) == len(buffer.view)
    assert given_array.tolist() == prompt


def test_after_a_truncation_appending_does_not_write_into_the_given_array():
    given_array = np.arange(4, dtype=np.int32)
    buffer = TokenBuffer(given_array)
    buffer.truncate(2)
    buffer.extend(np.array([9], np.int32))
    assert buffer.view.tolist() == [0, 1, 9]
    assert given_array.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("length", [-1, 5])
def test_truncating_beyond_the_tokens_is_refused(length):
    with pytest.raises(ConfigurationError, match=r"outside 0\.\.4"):
        TokenBuffer(np.arange(4, dtype=np.int32)).truncate(length)


@given(
    st.lists(INT32),
    st.booleans(),
    st.lists(st.lists(INT32, max_size=5) | st.integers(0, 20) | st.none(), max_size=12),
)
def test_a_snapshot_stays_what_it_was(prompt, late, steps):
    buffer = TokenBuffer(LateTokens(prompt) if late else np.array(prompt, np.int32))
    now = list(prompt)
    taken = []
    for step in steps:
        if step is None:
            taken.append((buffer.snapshot(), list(now)))
        elif isinstance(step, int):
            del now[step:]
            buffer.truncate(len(now))
        else:
            now += step
            buffer.extend(np.array(step, np.int32))
    assert buffer.view.tolist() == now
    for snapshot, then in taken:
        assert snapshot.view.tolist() == then
        shorter = min(len(now), len(then))
        for length in (shorter, shorter // 2):
            assert buffer.starts_as(snapshot, length) == (now[:length] == then[:length])


def test_late_tokens_are_converted_once_and_for_all_who_share_them(monkeypatch):
    converted = []
    monkeypatch.setattr(
        "kvconnect.tokens.as_token_array",
        lambda tokens: converted.append(tokens) or as_token_array(tokens),
    )
    late = LateTokens([1, 2, 3])
    one = TokenBuffer(late)
    other = one.snapshot()
    assert (len(one), late.array, converted) == (3, None, [])
    assert one.view.tolist() == other.view.tolist() == [1, 2, 3]
    assert converted == [[1, 2, 3]]


def test_late_tokens_are_refused_by_everybody_who_reads_them():
    buffer = TokenBuffer(LateTokens([1, 2**40]))
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="1099511627776 is outside int32"):
            _ = buffer.view
