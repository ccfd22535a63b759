"""Text that is far too long is refused by its beginning: to make tokens of all of it takes long."""

from __future__ import annotations

import pytest

from kvconnect.engine.request.tokenizer import Tokenizer
from kvconnect.errors import ConfigurationError

CHAT = [{"role": "user", "content": "x" * 200_000}]


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """Characters of each text that is made tokens of."""
    lengths: list[int] = []
    ids = Tokenizer._ids

    def noted(self, text, **how):
        lengths.append(len(text))
        return ids(self, text, **how)

    monkeypatch.setattr(Tokenizer, "_ids", noted)
    return lengths


def test_what_is_far_too_long_is_refused_by_its_beginning(llama, open_llm, with_template, encoded):
    llm = open_llm(with_template(llama, "{{ messages[0].content }}"))
    most = llm.max_seq_len
    with pytest.raises(ConfigurationError, match=rf"its 200000 characters .* room for {most} in"):
        llm.submit("x" * 200_000)
    with pytest.raises(ConfigurationError, match=r"its 200000 characters"):
        llm.chat_prompt(CHAT)
    assert sum(encoded) < 2 * 8 * (most + 100)
    with pytest.raises(ConfigurationError, match=rf"prompt: {most + 50} tokens"):
        llm.submit("x" * (most + 50))


@pytest.mark.parametrize("characters_of_token", [1, 7, 100])
def test_what_may_fit_is_encoded_whole(llama, monkeypatch, characters_of_token):
    tokenizer = Tokenizer(llama)
    ids = Tokenizer._ids
    monkeypatch.setattr(
        Tokenizer, "_ids", lambda *given, **how: ids(*given, **how)[::characters_of_token]
    )
    text = "ab" * (50 * characters_of_token)
    whole = tokenizer.encode(text)
    assert tokenizer.encode(text, most=100).tolist() == whole.tolist()
    if characters_of_token == 100:
        with pytest.raises(ConfigurationError, match=r"the first 36352 of its 100000 characters"):
            tokenizer.encode("ab" * 50_000, most=7)
