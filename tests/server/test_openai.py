"""What the official client asks of the server, and gets."""

from __future__ import annotations

import openai
import pytest

PROMPT = "The quick brown fox jumps over the lazy dog, and the dog takes no notice of it. " * 3
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a KV cache?"},
]
COMPLETION = {"model": "tiny", "max_tokens": 24, "temperature": 0, "seed": 1}


def text_of(chunks) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def test_models_are_listed(client):
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")


def test_a_prompt_is_completed(client):
    answer = client.completions.create(prompt=PROMPT, extra_body={"ignore_eos": True}, **COMPLETION)
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == len(PROMPT) + 24
    as_tokens = client.completions.create(
        prompt=list(PROMPT.encode()), extra_body={"ignore_eos": True}, **COMPLETION
    )
    assert as_tokens.choices[0].text == choice.text


@pytest.mark.parametrize("salt", [None, "mine"])
def test_a_client_is_told_why_its_prompt_was_computed(client, salt):
    """Without a salt in whole blocks only."""
    body = {"kvconnect": {"explain": True}} | ({} if salt is None else {"cache_salt": salt})
    prompts = [f"{salt} is told why. Today is {day}, says the server." for day in ("Mon", "Fri")]
    cold, near = (
        client.completions.create(prompt=one, extra_body=body, **COMPLETION) for one in prompts
    )
    (found,) = cold.usage.kvconnect["explain"]
    most = len(prompts[0]) - 1
    assert found["tokens"] == {"new": most, "last": 1}
    (found,) = near.usage.kvconnect["explain"]
    at = prompts[0].index("Mon")
    if salt is None:
        place = at // 16 * 16
        assert found["tokens"] == {"reused": place, "new": most - place, "last": 1}
        assert "divergence" not in found
    else:
        assert found["tokens"] == {"reused": at, "diverged": most - at, "last": 1}
        assert found["spans"][1] == {"start": at, "end": most, "outcome": "diverged"}
        assert found["divergence"]["position"] == at
        assert found["divergence"]["before"].endswith("Today is ")
        assert found["divergence"]["prompt"].startswith("Fri")
        assert "Mon".startswith(found["divergence"]["cached"][:3])


def test_without_a_salt_the_part_of_a_block_at_the_end_tells_nothing(client):
    """Otherwise a guess of one more token of an unsalted prompt would be answered."""
    whole, rest = "Another client's prompt is known so far, and then goes on:"[:48], "7391 is it"
    told = {"kvconnect": {"explain": True}}

    def ask(prompt: str) -> object:
        answer = client.completions.create(prompt=prompt, extra_body=told, **COMPLETION)
        return answer.usage.kvconnect

    client.completions.create(prompt=whole + rest, **COMPLETION)
    for length in range(1, 5):
        right, wrong = ask(f"{whole}{rest[:length]}\0"), ask(f"{whole}{'x' * length}\0")
        assert right == wrong
        assert right["explain"][0]["tokens"] == {"reused": 48, "new": length, "last": 1}
    assert ask(whole + rest) == ask(whole + rest[::-1])
    longer = " and then it goes on for several blocks"
    assert ask(whole + rest + longer) == ask(whole + rest[::-1] + longer)
    assert ask("A\0") == ask("Z\0")  # a first token, which other prompts have


def test_a_client_is_told_nothing_of_other_salts(client):
    prompt = "Two salts ask the same thing, and neither hears of the other. " * 2
    ask = {"kvconnect": {"explain": True}}
    for salt in ("one", "other"):
        answer = client.completions.create(
            prompt=prompt, extra_body=ask | {"cache_salt": salt}, **COMPLETION
        )
        assert set(answer.usage.kvconnect["explain"][0]["tokens"]) == {"new", "last"}


def test_a_prompt_that_was_answered_is_cached(client):
    prompt = "No other test asks this prompt. " * 4
    first, second = (client.completions.create(prompt=prompt, **COMPLETION) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == (len(prompt) - 1) // 16 * 16
    assert second.choices[0].text == first.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_are_asked_for_to_fill_the_cache(client, stream):
    """A request of none computes its prompt, and the next one finds that."""
    prompt = f"{stream}: to be asked for soon, and so computed now. " * 4
    answer = client.completions.create(
        prompt=prompt,
        stream=stream,
        stream_options={"include_usage": True} if stream else openai.omit,
        **COMPLETION | {"max_tokens": 0},
    )
    chunks = list(answer) if stream else [answer]
    assert text_of(chunks) == ""
    assert [choice.finish_reason for one in chunks for choice in one.choices] == ["length"]
    assert chunks[-1].usage.completion_tokens == 0
    warm = client.completions.create(prompt=prompt, **COMPLETION)
    assert warm.usage.prompt_tokens_details.cached_tokens == (len(prompt) - 1) // 16 * 16
    chat = client.chat.completions.create(messages=MESSAGES, model="tiny", max_completion_tokens=0)
    assert chat.usage.completion_tokens == 0


def test_cached_blocks_are_shared_under_one_salt_only(client):
    def cached(salt: str | None) -> int:
        body = {} if salt is None else {"cache_salt": salt}
        prompt = "Several salts are asked the same. " * 4
        answer = client.completions.create(prompt=prompt, extra_body=body, **COMPLETION)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached(salt) for salt in (None, "a", "b")] == [0, 0, 0]
    assert all(cached(salt) for salt in (None, "a", "b"))


@pytest.mark.parametrize("stream", [False, True])
def test_counts_do_not_tell_anothers_prompt_character_by_character(client, stream):
    """Exact counts gave away 21 characters of another's prompt to 523 requests."""
    begun = f"{stream}: the password of the store is".ljust(48)
    secret = "cabbadcabdbcadbacbdca"

    def cached(prompt: str, salt: str | None = None) -> int:
        answer = client.completions.create(
            prompt=prompt,
            extra_body={} if salt is None else {"cache_salt": salt},
            stream=stream,
            stream_options={"include_usage": True} if stream else openai.omit,
            **COMPLETION | {"max_tokens": 1},
        )
        *_, last = answer if stream else [answer]
        return last.usage.prompt_tokens_details.cached_tokens

    for salt in (None, "mine"):
        cached(begun + secret + ". Keep it.", salt)
    for known in (0, 6, 14):  # also who knows a part of it does not learn the next character
        guesses = (secret[known], "z")
        assert [cached(begun + secret[:known] + one + "?") for one in guesses] == [48, 48], known
    # A tenant reads its own prompts alone, and its counts are exact.
    assert cached(begun + secret[:5] + "?", "mine") == 48 + 5


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "n": 3}, {"stop": ["e", "o"]}])
def test_a_stream_is_the_whole_answer_in_pieces(client, sampling):
    asked = {**COMPLETION, "prompt": PROMPT, **sampling}
    whole = client.completions.create(**asked)
    texts = dict.fromkeys(range(len(whole.choices)), "")
    reasons = {}
    *chunks, last = client.completions.create(
        stream=True, stream_options={"include_usage": True}, **asked
    )
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason is not None:
            reasons[choice.index] = choice.finish_reason
    assert texts == {one.index: one.text for one in whole.choices}
    assert reasons == {one.index: one.finish_reason for one in whole.choices}
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_several_choices(client, stream):
    prompts = ["one prompt", "another prompt", "a third"]
    alone = [
        client.completions.create(prompt=prompt, **COMPLETION).choices[0].text for prompt in prompts
    ]
    answer = client.completions.create(prompt=prompts, stream=stream, **COMPLETION)
    texts = dict.fromkeys(range(3), "")
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == alone


def test_a_chat_goes_through_the_template(client):
    asked = {"messages": MESSAGES, "model": "tiny", "max_tokens": 16, "temperature": 0}
    answer = client.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    rendered = "".join(f"[{one['role']}] {one['content']}\n" for one in MESSAGES) + "[assistant] "
    assert answer.usage.prompt_tokens == len(rendered)
    prompt = client.completions.create(prompt=rendered, **COMPLETION | {"max_tokens": 16})
    assert prompt.choices[0].text == choice.message.content
    beginning, *chunks = client.chat.completions.create(stream=True, **asked)
    assert beginning.choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content for one in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason


def test_a_chat_may_be_as_long_as_the_model(client):
    # To its end-of-sequence token or to the last position: never the 16 tokens of completions.
    long = "x" * 4000
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": long}], model="tiny", extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 4096


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_completion(client, stream):
    answer = client.completions.create(prompt=PROMPT, logprobs=3, stream=stream, **COMPLETION)
    found = [chunk.choices[0].logprobs for chunk in (answer if stream else [answer])]
    tokens = [token for one in found for token in one.tokens]
    chosen = [logprob for one in found for logprob in one.token_logprobs]
    top = [each for one in found for each in one.top_logprobs]
    offsets = [offset for one in found for offset in one.text_offset]
    assert len(tokens) == len(chosen) == len(top) == len(offsets)
    assert all(one <= 0 for one in chosen)
    # Greedy: the chosen one is the likeliest.
    assert chosen == [max(each.values()) for each in top]
    assert chosen == [each[token] for each, token in zip(top, tokens, strict=True)]
    assert offsets == [sum(map(len, tokens[:index])) for index in range(len(tokens))]


def test_log_probabilities_of_a_chat(client):
    answer = client.chat.completions.create(
        messages=MESSAGES, model="tiny", max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    for entry in answer.choices[0].logprobs.content:
        first, second = entry.top_logprobs
        assert (first.token, first.logprob) == (entry.token, entry.logprob)
        assert second.logprob <= first.logprob
        assert bytes(entry.bytes).decode() == entry.token


def test_seeds_repeat_and_penalties_count(client):
    def ask(**sampling: object) -> str:
        asked = {**COMPLETION, "temperature": 1.0, "prompt": PROMPT, **sampling}
        return client.completions.create(**asked).choices[0].text

    assert ask(seed=7) == ask(seed=7) != ask(seed=8)
    greedy = {"temperature": 0, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    plain = ask(**greedy)
    punished = ask(frequency_penalty=2.0, presence_penalty=2.0, **greedy)
    assert len(set(punished)) > len(set(plain))


def test_an_answer_says_what_stopped_it(client):
    asked = {**COMPLETION, "prompt": PROMPT}
    text = client.completions.create(**asked).choices[0].text
    stop = text[3:6]
    choice = client.completions.create(stop=stop, **asked).choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    assert choice.stop_reason == stop
