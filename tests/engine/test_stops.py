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


STOPS = {
    "length": (b"abcdef", {"max_tokens": 3}, ["a", "b", "c"], "length"),
    "the model's own end of sequence": ([97, 256, 98], {}, ["a", ""], "stop"),
    "stop tokens end the text before them": (b"abc", {"stop_token_ids": (98,)}, ["a", ""], "stop"),
    "text that may begin a stop string is held back": (
        *(b"aSTaSTOPb", {"stop": ("STOP",)}),
        *(["a", "", "", "STa", "", "", "", ""], "stop"),
    ),
    "held back text comes out at the end": (
        *(b"aST", {"stop": ("STOP",), "max_tokens": 3}),
        *(["a", "", "ST"], "length"),
    ),
    "and where it was aborted": (b"aST", {"stop": ("STOP",)}, ["a", "", "", "ST"], None),
    "stop strings are not part of the text": (b"one\n\nt", {"stop": ("\n\n",)}, "one", "stop"),
    "a single stop string needs no list": (b"one\n\nt", {"stop": "\n\n"}, "one", "stop"),
    "the earliest of several counts": (b"abcd", {"stop": ("d", "bc")}, "a", "stop"),
    "one inside another one's beginning": (
        *(b"xaabaac", {"stop": ("aabaab", "aac")}, "xaab", "stop"),
    ),
    "one of several bytes": ("so\u2211ja".encode(), {"stop": ("\u2211j",)}, "so", "stop"),
    # The case of vLLM's own test of its detokenizer.
    "none counts within the least length": (
        *(b" is Lee, and I'm a student in the college", {"stop": "e", "min_tokens": 7}),
        *(" is Lee, and I'm a stud", "stop"),
    ),
    "one that ends beyond the least length counts": (
        *(b"xabcy", {"stop": "abc", "min_tokens": 3}, "x", "stop"),
    ),
    "one that ends within it does not": (
        *(b"xabcyabcz", {"stop": "abc", "min_tokens": 4}, "xabcy", "stop"),
    ),
    "one inside the held beginning of another came too early": (
        *(b"xaaxyaz", {"stop": ("aaay", "a"), "min_tokens": 3}, "xaaxy", "stop"),
    ),
    # The sampler does not choose a stop token there: this is for drafts and the like.
    "a stop token does not count within the least length": (
        *([97, 256, 98, 256], {"min_tokens": 3}, ["a", "", "b", ""], "stop"),
    ),
    "the least length is all of it": (
        *(b"abc", {"stop": "b", "min_tokens": 3, "max_tokens": 3}, "abc", "length"),
    ),
    "characters come out whole": (
        *("a\u00e9\u2211\U0001f600b".encode(), {}),
        *(["a", "", "\u00e9", "", "", "\u2211", "", "", "", "\U0001f600", "b", ""], None),
    ),
    "an unfinished character at the end is replaced": (
        *([97, 0xE2, 0x88], {"max_tokens": 3}, "a\ufffd", "length"),
    ),
}
"""Tokens, parameters; the texts one by one, or all of them; why it stopped."""


@pytest.mark.parametrize("what", STOPS)
def test_when_it_ends_with_which_text(what, tokenizer):
    tokens, params, expected, wanted = STOPS[what]
    texts, reason = run(tokenizer, tokens, **params)
    assert (texts if isinstance(expected, list) else "".join(texts)) == expected
    assert reason == wanted


def test_an_end_of_sequence_that_is_ignored_is_a_token(tokenizer):
    assert run(tokenizer, [97, 256, 98], ignore_eos=True)[1] is None


def test_what_it_stopped_with(tokenizer):
    def stopped(tokens, **params):
        checker = StopChecker(SamplingParams(max_tokens=9, **params), EOS, tokenizer)
        return [checker.add(token) for token in tokens][-1].stop_reason

    assert stopped(b"abc", stop=("x", "bc")) == "bc"
    assert stopped(b"abc", stop_token_ids=(99,)) == 99
    assert stopped([97, 256]) is None
    assert stopped(b"abcdefghi") is None


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
