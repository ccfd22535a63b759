"""When a generation ends, and which text it then has."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect import SamplingParams
from kvconnect.engine.request.stops import StopChecker
from kvconnect.engine.request.tokenizer import Detokenizer, Tokenizer

EOS = frozenset({256})


@pytest.fixture(scope="module")
def tokenizer(llama):
    return Tokenizer(llama)


def run(tokenizer, tokens, **params):
    """Feed `tokens` to a checker: the texts it gave out one by one, and why it stopped."""
    checker = StopChecker(SamplingParams(**{"max_tokens": 99} | params), EOS, tokenizer)
    texts = []
    for token in tokens:
        status = checker.add(token)
        texts.append(status.text)
        if status.finish_reason:
            return texts, status.finish_reason
    return [*texts, checker.abort()], None


def test_length(tokenizer):
    assert run(tokenizer, b"abcdef", max_tokens=3) == (["a", "b", "c"], "length")


def test_the_models_own_end_of_sequence(tokenizer):
    assert run(tokenizer, [97, 256, 98]) == (["a", ""], "stop")
    assert run(tokenizer, [97, 256, 98], ignore_eos=True)[1] is None


def test_stop_tokens_end_the_text_before_them(tokenizer):
    assert run(tokenizer, b"abc", stop_token_ids=(98,)) == (["a", ""], "stop")


def test_stop_strings_are_not_part_of_the_text(tokenizer):
    texts, reason = run(tokenizer, b"one\n\ntwo", stop=("\n\n",))
    assert ("".join(texts), reason) == ("one", "stop")


def test_text_that_may_begin_a_stop_string_is_held_back(tokenizer):
    texts, reason = run(tokenizer, b"aSTaSTOPb", stop=("STOP",))
    assert texts == ["a", "", "", "STa", "", "", "", ""]
    assert reason == "stop"


def test_held_back_text_comes_out_at_the_end(tokenizer):
    assert run(tokenizer, b"aST", stop=("STOP",), max_tokens=3) == (["a", "", "ST"], "length")
    assert run(tokenizer, b"aST", stop=("STOP",)) == (["a", "", "", "ST"], None)


def test_the_earliest_of_several_stop_strings_counts(tokenizer):
    texts, reason = run(tokenizer, b"abcd", stop=("d", "bc"))
    assert ("".join(texts), reason) == ("a", "stop")


def test_a_stop_string_inside_another_ones_beginning(tokenizer):
    assert "".join(run(tokenizer, b"xaabaac", stop=("aabaab", "aac"))[0]) == "xaab"


def test_a_single_stop_string_needs_no_list(tokenizer):
    texts, reason = run(tokenizer, b"one\n\ntwo", stop="\n\n")
    assert ("".join(texts), reason) == ("one", "stop")


def test_what_it_stopped_with(tokenizer):
    def stopped(tokens, **params):
        checker = StopChecker(SamplingParams(max_tokens=9, **params), EOS, tokenizer)
        return [checker.add(token) for token in tokens][-1].stop_reason

    assert stopped(b"abc", stop=("x", "bc")) == "bc"
    assert stopped(b"abc", stop_token_ids=(99,)) == 99
    assert stopped([97, 256]) is None
    assert stopped(b"abcdefghi") is None


def test_no_stop_string_counts_within_the_least_length(tokenizer):
    # The case of vLLM's own test of its detokenizer.
    text = " is Lee, and I'm a student in the college"
    texts, reason = run(tokenizer, text.encode(), stop="e", min_tokens=7)
    assert ("".join(texts), reason) == (" is Lee, and I'm a stud", "stop")
    texts, _ = run(tokenizer, text.encode(), stop="e")
    assert "".join(texts) == " is L"


def test_a_stop_string_that_ends_beyond_the_least_length_counts(tokenizer):
    texts, reason = run(tokenizer, b"xabcy", stop="abc", min_tokens=3)
    assert ("".join(texts), reason) == ("x", "stop")
    texts, _ = run(tokenizer, b"xabcyabcz", stop="abc", min_tokens=4)
    assert "".join(texts) == "xabcy"


def test_a_stop_string_inside_the_held_beginning_of_another_came_too_early(tokenizer):
    texts, reason = run(tokenizer, b"xaaxyaz", stop=("aaay", "a"), min_tokens=3)
    assert ("".join(texts), reason) == ("xaaxy", "stop")


def test_a_stop_token_does_not_count_within_the_least_length(tokenizer):
    # The sampler does not choose one there: this is for drafts and the like.
    assert run(tokenizer, [97, 256, 98, 256], min_tokens=3)[1] == "stop"
    assert len(run(tokenizer, [97, 256, 98, 256], min_tokens=3)[0]) == 4


def test_the_least_length_is_all_of_it(tokenizer):
    texts, reason = run(tokenizer, b"abc", stop="b", min_tokens=3, max_tokens=3)
    assert ("".join(texts), reason) == ("abc", "length")


def test_characters_come_out_whole(tokenizer):
    text = "a\u00e9\u2211\U0001f600b"
    texts, _ = run(tokenizer, text.encode())
    assert "".join(texts) == text
    assert texts == ["a", "", "\u00e9", "", "", "\u2211", "", "", "", "\U0001f600", "b", ""]


def test_an_unfinished_character_at_the_end_is_replaced(tokenizer):
    texts, reason = run(tokenizer, [97, 0xE2, 0x88], max_tokens=3)
    assert ("".join(texts), reason) == ("a\ufffd", "length")


def test_stop_strings_of_several_bytes(tokenizer):
    texts, reason = run(tokenizer, "so\u2211ja".encode(), stop=("\u2211j",))
    assert ("".join(texts), reason) == ("so", "stop")


def test_streamed_text_is_the_text_of_all_tokens(tokenizer):
    tokens = [*"gr\u00fc\u00df \u4e16\u754c".encode(), 0xFF, 0xC3, *b"end", 256, *b"x"]
    detokenizer = Detokenizer(tokenizer)
    streamed = "".join(detokenizer.add(token) for token in tokens) + detokenizer.finish()
    assert streamed == tokenizer.decode(tokens)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from(
            [b"\xff", b"\x80", b"\xe2\x82", b"\xe2\x82\xac", b"\xf0\x9f", b"a", b"\xc3"]
        ),
        max_size=40,
    )
)
def test_of_invalid_bytes_no_text_is_lost(tokenizer, pieces):
    tokens = list(b"".join(pieces))
    detokenizer = Detokenizer(tokenizer)
    streamed = "".join(detokenizer.add(token) for token in tokens) + detokenizer.finish()
    assert streamed == tokenizer.decode(tokens)


@pytest.mark.parametrize("endless", [[0x80], [0xE2, 0x82], [0xFF, 0xF0, 0x9F, 0x98], [256]])
def test_what_never_becomes_a_character_is_not_decoded_again_and_again(tokenizer, endless):
    counting = CountingTokenizer(tokenizer)
    detokenizer = Detokenizer(counting)
    tokens = [97, *(endless * 1000)]
    texts = [detokenizer.add(token) for token in tokens]
    assert counting.decoded < 40 * len(tokens)
    text = "".join(texts)
    assert tokenizer.decode(tokens).startswith(text)
    assert len(tokenizer.decode(tokens)) - len(text) <= 8, "and it is told as it comes"


class CountingTokenizer:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.decoded = 0

    def decode(self, tokens):
        self.decoded += len(tokens)
        return self._tokenizer.decode(tokens)


def test_without_a_tokenizer_there_is_no_text():
    checker = StopChecker(SamplingParams(max_tokens=2), EOS, None)
    assert checker.add(5).text == ""
    assert checker.add(5).finish_reason == "length"


def test_through_the_engine(llama, open_llm, tokenizer):
    llm = open_llm(llama)
    free = llm.generate("Once upon a time", SamplingParams(max_tokens=40, ignore_eos=True))[0]
    assert free.output_text == tokenizer.decode(list(free.output_token_ids))
    assert free.finish_reason == "length"
    stop = free.output_text[5:7]
    cut = llm.generate("Once upon a time", SamplingParams(max_tokens=40, stop=(stop,)))[0]
    assert cut.finish_reason == "stop"
    assert cut.output_text == free.output_text[: free.output_text.index(stop)]
    token = free.output_token_ids[6]
    params = SamplingParams(max_tokens=40, stop_token_ids=(token,))
    cut = llm.generate("Once upon a time", params)[0]
    length = free.output_token_ids.index(token) + 1
    assert cut.output_token_ids == free.output_token_ids[:length]
