"""``kvconnect generate``: JSONL files, chats, and the parameters of sampling."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from kvconnect.cli.prompts import read_prompts
from kvconnect.errors import ConfigurationError

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model(model: Path, with_template) -> Path:
    """The same model with a chat template."""
    return with_template(model, TEMPLATE)


@pytest.fixture
def jsonl(tmp_path):
    """Writes lines to a file."""

    def write(*lines: object) -> Path:
        file = tmp_path / "prompts.jsonl"
        file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8")
        return file

    return write


def test_a_line_is_a_prompt_in_any_form(answer, jsonl, monkeypatch):
    tokens = list(b"Hello")
    forms = ["Hello", tokens, {"prompt": "Hello"}, {"prompt_token_ids": tokens}]
    expected = answer("--prompt", "Hello")[0]["output_token_ids"]
    monkeypatch.setattr(sys, "stdin", io.StringIO('"one"\n\n"three"'))
    found = answer("--jsonl", jsonl(*forms), "-")
    assert [one["output_token_ids"] for one in found[:4]] == [expected] * 4
    assert [one["prompt_tokens"] for one in found[4:]] == [3, 5], "of standard input"


def test_a_line_has_its_own_parameters(answer, jsonl):
    lines = [
        {"prompt": "Hello"},
        {"prompt": "Hello", "max_tokens": 3},
        {"prompt": "Hello", "temperature": 1.0, "seed": 3, "n": 2},
        {"prompt": "Hello", "stop": "x" * 9},
    ]
    found = answer("--jsonl", jsonl(*lines))
    assert [len(one["output_token_ids"]) for one in found] == [6, 3, 6, 6]
    assert [len(one.get("outputs", [])) for one in found] == [0, 0, 2, 0]


def test_a_line_has_its_own_salt(answer, jsonl):
    text = "Hello " * 20
    salts = [{"prompt": text, "cache_salt": salt} for salt in ("a", "b", "a")]
    found = answer("--jsonl", jsonl(*salts), "--max-batch-size", 1)
    assert [one["reused_device_tokens"] > 0 for one in found] == [False, False, True]


def test_chat_puts_prompts_into_the_template(answer, jsonl):
    (plain,) = answer("--prompt", "<user>Hello<assistant>")
    (chat,) = answer("--chat", "--prompt", "Hello")
    messages = {"messages": [{"role": "user", "content": "Hello"}]}
    lines = answer("--jsonl", jsonl(messages))
    both = answer("--chat", "--jsonl", jsonl("Hello", messages))
    for one in (chat, *lines, *both):
        assert one["output_token_ids"] == plain["output_token_ids"]
        assert one["prompt_tokens"] == plain["prompt_tokens"]


def test_several_answers_and_log_probabilities(answer, kvconnect, model):
    sampled = ("--prompt", "Hello", "--n", 3, "--temperature", 1, "--seed", 5, "--logprobs", 2)
    (found,) = answer(*sampled)
    assert [one["index"] for one in found["outputs"]] == [0, 1, 2]
    first = found["outputs"][0]
    assert first["token_ids"] == found["output_token_ids"]
    assert first["text"] == found["output_text"]
    assert len(first["logprobs"]) == 6
    for token, logprobs in zip(first["token_ids"], first["logprobs"], strict=True):
        assert logprobs[str(token)]["rank"] >= 1
    total = sum(
        logprobs[str(token)]["logprob"]
        for token, logprobs in zip(first["token_ids"], first["logprobs"], strict=True)
    )
    assert first["cumulative_logprob"] == pytest.approx(total)
    code, out, err = kvconnect(
        *("generate", model, "--dtype", "float64", "--max-tokens", 6, "--ignore-eos"), *sampled
    )
    assert code == 0
    assert out == "".join(one["text"] + "\n" for one in found["outputs"])
    assert "18 tokens, length, length, length]" in err


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: is not JSON"),
        ("5", 'line 2: write {"prompt"'),
        ("{}", "line 2: 0 of prompt, prompt_token_ids, messages are given"),
        ('{"prompt": "x", "messages": []}', "line 2: 2 of prompt"),
        ('{"promt": "x"}', "line 2: unknown key 'promt'; did you mean 'prompt'"),
        ('{"prompt": "x", "max_tokens": -1}', "line 2: SamplingParams.max_tokens=-1"),
        ('{"prompt": 5}', "prompt: 'prompt' is a string, this is int"),
        ('{"prompt_token_ids": [999]}', "token id 999 is outside"),
        ('{"messages": "Hello"}', "messages"),
    ],
)
def test_a_mistake_names_the_line(kvconnect, model, tmp_path, line, complaint):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"fine"\n{line}\n', encoding="utf-8")
    code, out, err = kvconnect("generate", model, "--jsonl", file)
    assert (code, out) == (2, "")
    (message,) = err.splitlines()
    assert complaint in message


def test_mistakes_about_chats(kvconnect, model, jsonl, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.jinja"))
    code, _, err = kvconnect("generate", bare, "--chat", "--prompt", "x")
    assert code == 2
    assert "the model has no chat template" in err
    code, _, err = kvconnect("generate", model, "--chat", "--jsonl", jsonl([1, 2]))
    assert code == 2
    assert "--chat: token ids are no message" in err
    code, _, err = kvconnect("generate", model, "--prompt", "x", "--n", 2)
    assert code == 2
    assert "n=2 needs a temperature above 0" in err


def test_a_model_by_its_name(kvconnect, model, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--name" / "snapshots" / "c0ffee"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(model)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("c0ffee")
    code, out, err = kvconnect("generate", "org/name", "--prompt", "x", "--max-tokens", 3)
    assert code == 0, err
    assert out


def test_a_line_ends_at_a_newline_only(tmp_path):
    """JSON has other line ends within its strings, as they are."""
    file, text = tmp_path / "prompts.jsonl", "one\u2028two\x85three"
    file.write_text(json.dumps(text, ensure_ascii=False) + "\r\n", encoding="utf-8")
    given = argparse.Namespace(
        salt=None, prompt=None, prompt_file=None, jsonl=[str(file)], chat=False
    )
    assert [one.content for one in read_prompts(given, {})] == [text]


def test_standard_input_is_utf8_whatever_the_locale(monkeypatch):
    given = argparse.Namespace(salt=None, prompt=None, prompt_file=["-"], jsonl=None, chat=False)
    for content in ("größer".encode(), b"\xff"):
        stream = io.TextIOWrapper(io.BytesIO(content), encoding="latin-1", errors="surrogateescape")
        monkeypatch.setattr(sys, "stdin", stream)
        if content == b"\xff":
            with pytest.raises(ConfigurationError, match="is not UTF-8"):
                list(read_prompts(given, {}))
        else:
            assert [one.content for one in read_prompts(given, {})] == ["größer"]
