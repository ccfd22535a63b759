"""Requests that are refused: each with its status and a reason, and others are undisturbed."""

from __future__ import annotations

import json
from functools import reduce

import pytest

GOOD = {"model": "tiny", "prompt": "a prompt", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 2}
DEEP = reduce(lambda inner, _: [inner], range(150), "x")


@pytest.fixture(autouse=True, scope="module")
def others_are_undisturbed(server):
    yield
    assert server.post(GOOD)[0] == 200
    assert server.live() == 0


OF_COMPLETIONS = [
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
    ({"prompt": DEEP}, "CompletionRequest.prompt"),
    ({"stop_token_ids": [True]}, "CompletionRequest.stop_token_ids.0=True"),
    ({"prompt": "x" * 5000}, "exceed 4096 positions"),
    ({"max_tokens": -1}, "max_tokens=-1"),
    ({"max_tokens": 5000}, "exceed 4096 positions"),
    ({"max_tokens": "many"}, "CompletionRequest.max_tokens='many'"),
    ({"max_tokens": True}, "CompletionRequest.max_tokens=True: must be a number"),
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
    ({"add_special_tokens": False}, "add_special_tokens: False is not served"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"prompt_logprobs": 21}, "prompt_logprobs: 21 are more than max_logprobs=20"),
    ({"prompt_logprobs": True}, "CompletionRequest.prompt_logprobs=True"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs: are not streamed"),
    ({"min_p": 2}, "min_p=2"),
    ({"request_id": ""}, "CompletionRequest.request_id"),
    ({"stream": True, "stream_options": {"usage": True}}, "did you mean 'include_usage'?"),
]
OF_CHATS = [
    ({"messages": []}, "there are none"),
    ({"messages": [{"content": "x"}]}, "messages[0]: role=None"),
    ({"messages": ["x"]}, "ChatRequest.messages.0"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ({"messages": [{"role": "user", "content": DEEP}]}, "messages[0]"),
    ({"top_logprobs": 2}, "needs logprobs=true"),
    ({"max_completion_tokens": True}, "ChatRequest.max_completion_tokens=True"),
    ({"chat_template_kwargs": {"tokenize": False}}, "'tokenize' is no variable"),
    ({"chat_template_kwargs": {"max_length": 10**9}}, "'max_length' is no variable"),
    ({"chat_template_kwargs": {"messages": []}}, "'messages' is no variable"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"chat_template": "{{ 1 }}"}, "chat_template: '{{ 1 }}' is not served"),
]


@pytest.mark.parametrize(
    ("path", "good", "change", "message"),
    [
        *(("/v1/completions", GOOD, *row) for row in OF_COMPLETIONS),
        *(("/v1/chat/completions", CHAT, *row) for row in OF_CHATS),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else "",
)
def test_a_wrong_field_is_named(server, path, good, change, message):
    body = {name: value for name, value in (good | change).items() if value is not None}
    status, answer, _ = server.post(body, path)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert message in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "the body is no JSON"),
        (b"[1]", 400, "the body is a list; send a JSON object"),
        (b"\xff\xfe", 400, "the body is no JSON"),
        (b"[" * 10_000, 400, "the body is no JSON"),
        (b'{"max_tokens": 2, "max\\u005ftokens": 3}', 400, "the key 'max_tokens' is there twice"),
        (b'{"prompt":[' + b"[]," * 300_000 + b"[]]}", 413, "at most"),
        (b'{"prompt": "' + b"x" * (2 << 20) + b'"}', 413, "larger than 1048576 bytes"),
    ],
    ids=range(7),
)
def test_what_is_no_json_object_of_its_size_is_refused(server, body, status, message):
    """The forms that JSON may have: test_json_text."""
    found, answer, _ = server.post(body)
    assert (found, message in answer["error"]["message"]) == (status, True)


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


def test_a_huge_body_that_does_not_say_its_length_is_refused(server):
    with server.connect() as one:
        one.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(20):
            one.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        assert one.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"Content-Type": "text/plain"}, 415, "application/json"),
        ({"Content-Type": ""}, 415, "application/json"),
        ({"Content-Type": "application/json; charset=latin-1"}, 415, "charset='latin-1'"),
        ({"Content-Encoding": "gzip"}, 415, "Content-Encoding: 'gzip'"),
        ({"Content-Type": 'Application/JSON ;charset="UTF-8"'}, 200, ""),
    ],
)
def test_another_content_type_is_refused(server, headers, status, message):
    found, answer, _ = server.post(json.dumps(GOOD).encode(), headers=headers)
    assert found == status
    assert message in json.dumps(answer, ensure_ascii=False)


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
