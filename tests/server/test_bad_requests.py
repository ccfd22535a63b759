"""Requests that are refused: each with its status and a reason, and others are undisturbed."""

from __future__ import annotations

import json

import pytest

GOOD = {"model": "tiny", "prompt": "a prompt", "max_tokens": 4}


@pytest.fixture(autouse=True)
def others_are_undisturbed(server):
    yield
    assert server.post(GOOD)[0] == 200
    assert server.live() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, "CompletionRequest.prompt: Field required"),
        ({"prompt": ""}, "it is empty"),
        ({"prompt": []}, "it is empty"),
        ({"prompt": [70, -1]}, "token id -1 is outside"),
        ({"prompt": [70, 10**12]}, "outside int32"),
        ({"prompt": {"a": 1}}, "CompletionRequest.prompt"),
        ({"prompt": [True, False]}, "CompletionRequest.prompt=[True, False]: must be text, token"),
        ({"prompt": [70, "71"]}, "CompletionRequest.prompt"),
        ({"prompt": [70.0]}, "CompletionRequest.prompt"),
        ({"prompt": ["70", 71]}, "CompletionRequest.prompt"),
        ({"prompt": [[70], ["71"]]}, "CompletionRequest.prompt"),
        ({"prompt": [[70], [[71]]]}, "CompletionRequest.prompt"),
        ({"stop_token_ids": [True]}, "CompletionRequest.stop_token_ids.0=True"),
        ({"prompt": "x" * 5000}, "exceed 4096 positions"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"max_tokens": 5000}, "exceed 4096 positions"),
        ({"max_tokens": "many"}, "CompletionRequest.max_tokens='many'"),
        ({"max_tokens": True}, "CompletionRequest.max_tokens=True: must be a number"),
        ({"n": True}, "CompletionRequest.n=True"),
        ({"logprobs": False}, "CompletionRequest.logprobs=False"),
        ({"temperature": False}, "CompletionRequest.temperature=False"),
        ({"stream": 1}, "CompletionRequest.stream=1"),
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 0}, "top_p=0"),
        ({"n": 0}, "n=0"),
        ({"n": 17, "temperature": 1}, "17 completions"),
        ({"n": 2, "temperature": 0}, "needs a temperature above 0"),
        ({"logprobs": 21}, "max_logprobs=20"),
        ({"stop": ["x"] * 65}, "CompletionRequest.stop"),
        ({"stop": "x" * 1001}, "CompletionRequest.stop"),
        ({"stop": ""}, "CompletionRequest.stop"),
        ({"cache_salt": ""}, "cache_salt: '' must not be empty; give 1 to 1,024 characters"),
        ({"cache_salt": "s" * 1025}, "has 1,025 characters; give 1 to 1,024, or no salt"),
        ({"cache_salt": ["s"]}, "cache_salt: ['s'] must be a string"),
        ({"seed": "x"}, "seed"),
        ({"tempature": 1}, "did you mean 'temperature'?"),
        ({"echo": 0}, "CompletionRequest.echo=0"),
        ({"best_of": True}, "best_of: True is not served"),
        ({"priority": False}, "priority: False is not served"),
        ({"length_penalty": 0.5}, "length_penalty: 0.5 is not served"),
        ({"skip_special_tokens": False}, "skip_special_tokens: False is not served"),
        ({"add_special_tokens": False}, "add_special_tokens: False is not served"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"prompt_logprobs": 21}, "prompt_logprobs: 21 are more than max_logprobs=20"),
        ({"prompt_logprobs": True}, "CompletionRequest.prompt_logprobs=True"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs: are not streamed"),
        ({"min_p": 2}, "min_p=2"),
        ({"request_id": ""}, "CompletionRequest.request_id"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"stream": True, "stream_options": {"usage": True}}, "did you mean 'include_usage'?"),
    ],
)
def test_a_wrong_field_is_named(server, change, message):
    body = {name: value for name, value in (GOOD | change).items() if value is not None}
    status, answer, _ = server.post(body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert message in answer["error"]["message"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "there are none"),
        ({"messages": [{"content": "x"}]}, "messages[0]: role=None"),
        ({"messages": ["x"]}, "ChatRequest.messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"top_logprobs": 2}, "needs logprobs=true"),
        ({"max_completion_tokens": True}, "ChatRequest.max_completion_tokens=True"),
        ({"chat_template_kwargs": {"tokenize": False}}, "'tokenize' is no variable"),
        ({"chat_template_kwargs": {"max_length": 10**9}}, "'max_length' is no variable"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"chat_template": "{{ 1 }}"}, "chat_template: '{{ 1 }}' is not served"),
    ],
)
def test_a_wrong_chat_is_refused(server, change, message):
    body = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 2} | change
    status, answer, _ = server.post(body, "/v1/chat/completions")
    assert status == 400
    assert message in answer["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b"[" * 10_000,
        b'{"prompt":' * 5_000 + b"1" + b"}" * 5_000,
        b'{"prompt": ' + b"1" * 100_000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(server, body):
    status, answer, _ = server.post(body)
    assert status == 400
    assert answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"prompt": "x", "max_tokens": 2, "max_tokens": 3}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": 2, "max\\u005ftokens": 3}', "max_tokens"),
        (b'{"prompt": "x", "stream_options": {"a": [1], "a": "{:"}}', "a"),
        (b'{"prompt": "\\\\", "a\\":": 2, "a\\":": 3}', 'a":'),
    ],
)
def test_a_key_that_comes_twice_is_named(server, body, key):
    status, answer, _ = server.post(body)
    assert (status, f"the key {key!r} is there twice" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize("part", ["[]", "{}", '{"a":1}'])
def test_a_body_of_more_values_than_its_size_is_for_is_refused(server, part):
    body = '{"prompt":[' + ",".join([part] * (900_000 // (len(part) + 1))) + "]}"
    status, answer, _ = server.post(body.encode())
    assert status == 413
    assert "at most" in answer["error"]["message"]


def test_values_within_strings_are_text(server):
    prompt = "[{:,}]" * 600
    assert server.post(GOOD | {"prompt": prompt})[0] == 200
    assert server.post(GOOD | {"prompt": prompt * 40})[0] == 400, "too long for the model"


def test_deep_values_are_refused(server):
    deep: object = "x"
    for _ in range(150):
        deep = [deep]
    for body, path in (
        ({"prompt": deep}, "/v1/completions"),
        ({"messages": [{"role": "user", "content": deep}]}, "/v1/chat/completions"),
    ):
        assert server.post(body, path)[0] == 400


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [None] * 10_000},
        {"prompt": [["x"]] * 10_000},
        {"prompt": "x", "max_tokens": "x" * 100_000},
        {"prompt": "x", "stop": [1] * 10_000},
        {"prompt": "x", "stop_token_ids": [""] * 10_000},
        {"prompt": "x", "x" * 100_000: 1},
        {"prompt": "x", "model": "x" * 100_000},
        {"prompt": "x", "stream_options": {"x" * 100_000: 1}},
        {"messages": [1] * 10_000},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{}] * 10_000},
    ],
    ids=lambda body: next(reversed(body)).strip("x"),
)
def test_an_error_is_short_however_much_is_wrong(server, body):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, answer, _ = server.post(body, path)
    assert status in {400, 404}
    assert len(answer["error"]["message"]) < 1000


def test_a_huge_body_is_refused_however_it_comes(server):
    status, answer, _ = server.post({"prompt": "x" * (2 << 20)})
    assert status == 413
    assert "larger than 1048576 bytes" in answer["error"]["message"]
    with server.connect() as one:  # without saying how long it will be
        one.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(20):
            one.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        assert one.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"Content-Type": "text/plain"}, "application/json"),
        ({"Content-Type": ""}, "application/json"),
        ({"Content-Type": "application/json; charset=latin-1"}, "charset='latin-1'"),
        ({"Content-Encoding": "gzip"}, "Content-Encoding: 'gzip'"),
    ],
)
def test_another_content_type_is_refused(server, headers, message):
    status, answer, _ = server.post(json.dumps(GOOD).encode(), headers=headers)
    assert status == 415
    assert message in answer["error"]["message"]


def test_json_may_say_that_it_is_utf_8(server):
    headers = {"Content-Type": 'Application/JSON ;charset="UTF-8"'}
    assert server.post(json.dumps(GOOD).encode(), headers=headers)[0] == 200


def test_another_model_path_or_method_is_refused(server):
    assert server.post(GOOD | {"model": "gpt-9"})[0] == 404
    assert server.post(GOOD, "/v1/nothing")[0] == 404
    assert server.post(b"", method="GET")[0] == 405


@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
@pytest.mark.parametrize("length", [b"5", b"0", b"500"])
def test_two_lengths_are_refused_and_the_connection_is_closed(server, path, length):
    """A proxy in front may go by one of them, and take the rest for another's request."""
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" % path.encode()
    body = b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    with server.connect() as one:
        both = b"Content-Length: %s\r\nTransfer-Encoding: chunked\r\n\r\n" % length
        one.sendall(head + both + body)
        answer = b"".join(iter(lambda: one.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1, "what follows is no request"
    assert b"Content-Length and Transfer-Encoding" in answer
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("sent", [b"\x00\x01\x02\x03" * 100, b"A" * 100_000, b"\r\n" * 50_000])
def test_what_is_no_http_is_cut(server, sent):
    with server.connect() as one:
        try:
            one.sendall(sent)
            answer = one.recv(100)
        except ConnectionError:
            answer = b""
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400 "), answer
