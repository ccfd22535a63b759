"""Fields and paths beyond OpenAI's API, as vLLM's server has them: its clients send them."""

from __future__ import annotations

import pytest
from server_process import running

import kvconnect
from kvconnect.cli.main import main

PROMPT = "The quick brown fox jumps over the lazy dog. " * 3
ASKED = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is a KV cache?"}]

NEUTRAL = {
    "allowed_token_ids": None,
    "bad_words": [],
    "best_of": 1,
    "documents": [],
    "include_stop_str_in_output": False,
    "length_penalty": 1,
    "logit_bias": {},
    "logits_processors": [],
    "min_p": 0,
    "mm_processor_kwargs": {},
    "priority": 0,
    "prompt_logprobs": None,
    "repetition_penalty": 1.0,
    "response_format": {"type": "text"},
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "structured_outputs": None,
    "tools": None,
    "top_k": -1,
    "truncate_prompt_tokens": None,
    "use_beam_search": False,
    "vllm_xargs": {},
}


def ask(server, path="/v1/completions", **fields):
    status, answer, _ = server.post(fields, path)
    assert status == 200, answer
    return answer


def events_of(client, **fields):
    kind = client.chat.completions if "messages" in fields else client.completions
    return list(kind.create(stream=True, **fields))


def test_neutral_values_ask_for_nothing(server):
    plain = ask(server, **ASKED)
    neutral = ask(server, **ASKED, **NEUTRAL, add_special_tokens=True, echo=False)
    assert neutral["choices"] == plain["choices"]
    chat = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    plain = ask(server, CHAT, **chat)
    more = {"add_special_tokens": False, "echo": False, "top_logprobs": 0}
    neutral = ask(server, CHAT, **chat, **NEUTRAL, **more, chat_template=None)
    assert neutral["choices"] == plain["choices"]


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_the_later_name_of_the_length_goes_first(server, path):
    prompt = {"prompt": PROMPT} if path != CHAT else {"messages": MESSAGES}
    asked = prompt | {"temperature": 0, "ignore_eos": True}
    both = ask(server, path, **asked, max_tokens=9, max_completion_tokens=3)
    assert both["usage"]["completion_tokens"] == 3
    alone = ask(server, path, **asked, max_completion_tokens=3)
    assert alone["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("asked", [{"prompt": [PROMPT, "b"]}, {"messages": MESSAGES}])
def test_a_stream_may_count_as_it_goes(client, asked):
    asked |= {
        "model": "tiny",
        "max_tokens": 5,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events_of(client, stream_options=options, **asked)
    counted = [chunk.usage.completion_tokens for chunk in chunks]
    assert counted == sorted(counted)
    assert counted[-1] == last.usage.completion_tokens
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {last.usage.prompt_tokens}
    assert last.choices == []
    # Alone it asks for nothing.
    chunks = events_of(client, stream_options={"continuous_usage_stats": True}, **asked)
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices


def test_other_chunks_have_no_usage_if_the_last_one_has(server):
    body = ASKED | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = server.events(body)
    assert chunks
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["usage"]["completion_tokens"] == 6
    plain = server.events(ASKED | {"stream": True})
    assert all("usage" not in chunk for chunk in plain)


@pytest.mark.parametrize("prompt", [PROMPT, list(PROMPT.encode())])
@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 1, "seed": 3}])
def test_echo_begins_with_the_prompt(server, prompt, more):
    asked = ASKED | {"prompt": prompt, "logprobs": 2} | more
    plain, echo = ask(server, **asked), ask(server, **asked, echo=True)
    for without, choice in zip(plain["choices"], echo["choices"], strict=True):
        assert choice["text"] == PROMPT + without["text"]
        told, alone = choice["logprobs"], without["logprobs"]
        count = len(PROMPT)
        assert told["tokens"] == list(PROMPT) + alone["tokens"]
        assert told["text_offset"][:count] == list(range(count))
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        assert told["token_logprobs"][count:] == pytest.approx(alone["token_logprobs"], abs=1e-5)
        for token, each, top in zip(
            told["tokens"][1:count],
            told["token_logprobs"][1:],
            told["top_logprobs"][1:],
            strict=False,
        ):
            assert top[token] == each <= max(top.values())
            assert len(top) in {2, 3}


def test_echo_scores_a_prompt_alone(server):
    """Log-likelihoods, as lm-eval asks for them."""
    both = ask(server, **ASKED | {"max_tokens": 0}, echo=True, logprobs=1)
    longer = ask(server, **ASKED, echo=True, logprobs=1)
    (choice,) = both["choices"]
    assert choice["text"] == PROMPT
    assert len(choice["logprobs"]["tokens"]) == len(PROMPT)
    known = longer["choices"][0]["logprobs"]["token_logprobs"][: len(PROMPT)]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(known[1:], abs=1e-5)


def test_echo_without_log_probabilities_uses_the_cache(server):
    prompt = "Asked twice, and the second time echoed. " * 3
    ask(server, **ASKED | {"prompt": prompt})
    echo = ask(server, **ASKED | {"prompt": prompt}, echo=True)
    assert echo["choices"][0]["text"].startswith(prompt)
    assert echo["usage"]["prompt_tokens_details"]["cached_tokens"] > 64


@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT, "another one"]])
def test_a_stream_echoes_each_prompt_once(server, prompts):
    asked = ASKED | {"prompt": prompts, "echo": True, "logprobs": 1, "return_token_ids": True}
    whole = ask(server, **asked)["choices"]
    texts = dict.fromkeys(range(len(prompts)), "")
    tokens, ids, of_prompt = {}, {}, {}
    for event in server.events(asked | {"stream": True}):
        for choice in event["choices"]:
            at = choice["index"]
            texts[at] += choice["text"]
            tokens.setdefault(at, []).extend(choice["logprobs"]["tokens"])
            ids.setdefault(at, []).extend(choice["token_ids"])
            of_prompt.setdefault(at, []).extend(choice.get("prompt_token_ids", []))
    for choice in whole:
        at = choice["index"]
        assert texts[at] == choice["text"]
        assert tokens[at] == choice["logprobs"]["tokens"]
        assert ids[at] == choice["token_ids"]
        assert of_prompt[at] == choice["prompt_token_ids"] == list(prompts[at].encode())


def test_log_probabilities_of_prompts(server):
    (choice,) = ask(server, **ASKED, prompt_logprobs=2)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(PROMPT) - 1
    for token, each in zip(PROMPT[1:].encode(), rest, strict=True):
        found = each[str(token)]
        assert found["decoded_token"] == chr(token)
        assert found["rank"] >= 1
        assert len(each) in {2, 3}
    chat = ask(server, CHAT, messages=MESSAGES, max_tokens=1, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_a_chat_tells_token_ids(server):
    asked = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    whole = ask(server, CHAT, **asked)
    count = whole["usage"]["prompt_tokens"]
    assert len(whole["prompt_token_ids"]) == count
    assert len(whole["choices"][0]["token_ids"]) == whole["usage"]["completion_tokens"]
    first, *rest = server.events(asked | {"stream": True}, CHAT)
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    streamed = [token for one in rest for token in one["choices"][0]["token_ids"]]
    assert streamed == whole["choices"][0]["token_ids"]


def test_the_clients_id_is_in_the_answers(server):
    assert ask(server, **ASKED, request_id="mine-7")["id"] == "cmpl-mine-7"
    ids = {event["id"] for event in server.events(ASKED | {"stream": True, "request_id": "a"})}
    assert ids == {"cmpl-a"}


def test_the_version_is_told(server):
    assert server.post(b"", "/version", method="GET")[:2] == (
        200,
        {"version": kvconnect.__version__},
    )


def test_the_tokenizer_tells_of_itself(server):
    status, told, _ = server.post(b"", "/tokenizer_info", method="GET")
    assert status == 200
    assert told["eos_token"]
    assert "{" in told["chat_template"]


def test_text_to_tokens_and_back(server):
    asked = {"model": "tiny", "prompt": "héllo", "return_token_strs": True}
    told = ask(server, "/tokenize", **asked)
    assert told["tokens"] == list("héllo".encode())
    assert (told["count"], told["max_model_len"]) == (6, 4096)
    assert told["token_strs"][0] == "h"
    assert ask(server, "/detokenize", model="tiny", tokens=told["tokens"]) == {"prompt": "héllo"}
    chat = ask(server, "/tokenize", messages=MESSAGES)
    answered = ask(server, CHAT, messages=MESSAGES, max_tokens=1)
    assert chat["count"] == answered["usage"]["prompt_tokens"]
    assert chat["token_strs"] is None
    assert ask(server, "/tokenize", prompt="")["tokens"] == []
    assert ask(server, "/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/tokenize", {"prompt": "a", "model": "gpt"}, 404, "'gpt' is not served"),
        ("/tokenize", {}, 400, "prompt, messages: give one of them"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "give one of them"),
        ("/tokenize", {"prompt": 7}, 400, "prompt=7"),
        ("/detokenize", {"tokens": [-1]}, 400, "-1 is outside the model's vocabulary"),
        ("/detokenize", {"tokens": [10**9]}, 400, "outside the model's vocabulary"),
        ("/detokenize", {"tokens": [True]}, 400, "must be a list of token ids"),
        ("/detokenize", {"tokens": "abc"}, 400, "must be a list of token ids"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
def test_tokens_that_are_wrong_are_refused(server, path, body, status, message):
    found, answer, _ = server.post(body, path)
    assert found == status
    assert message in answer["error"]["message"]


def test_the_cache_may_be_emptied(server):
    prompt = "Kept until the cache is emptied. " * 4
    cached = [
        ask(server, **ASKED | {"prompt": prompt})["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached == [0, 112 + 16]
    assert server.raw(b"", "/reset_prefix_cache")[:2] == (200, b"")
    again = ask(server, **ASKED | {"prompt": prompt})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_cache_in_use_is_not_emptied(server):
    body = ASKED | {"max_tokens": 3000, "stream": True, "ignore_eos": True}
    with server.streaming(body) as lines:
        next(lines)
        assert server.post(b"", "/reset_prefix_cache")[0] == 409


# ---------------------------------------------------------------- options


def test_names_a_template_and_salts_that_are_required(model, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for one in messages %}<{{ one.content }}>{% endfor %}")
    options = ("--served-model-name", "first", "second", "--chat-template", str(template))
    with running(model, tmp_path / "output", *options, "--require-salt") as server:
        status, answer, _ = server.post(ASKED | {"model": "first"})
        assert (status, answer["error"]["code"]) == (400, "salt_required")
        asked = {"messages": MESSAGES, "max_tokens": 1, "cache_salt": "mine"}
        for name in ("first", "second", None):
            chat = ask(server, CHAT, **asked, **({} if name is None else {"model": name}))
            assert chat["model"] == "first"
            assert chat["usage"]["prompt_tokens"] == len(MESSAGES[0]["content"]) + 2
        _, models, _ = server.post(b"", "/v1/models", method="GET")
        assert [one["id"] for one in models["data"]] == ["first", "second"]
        assert server.post(ASKED | {"cache_salt": "mine"})[0] == 404, "tiny is no name of it"


@pytest.mark.parametrize(
    ("text", "message"), [(None, "cannot be read"), ("{% for %}", "is no template: line 1")]
)
def test_a_wrong_template_is_refused_at_once(tmp_path, capsys, text, message):
    path = tmp_path / "template.jinja"
    if text is not None:
        path.write_text(text)
    assert main(["serve", "/no/model", "--chat-template", str(path), "--port", "0"]) == 2
    assert message in capsys.readouterr().err
