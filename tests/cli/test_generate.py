"""``kvconnect generate``: answers on standard output, everything else on standard error."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

from kvconnect.backends.memory import MemoryBackend
from kvconnect.cli.commands.generate import shown_on
from kvconnect.trace import metrics

FIELDS = [
    *("request_id", "prompt_tokens", "computed_tokens", "reused_device_tokens"),
    *(
        "reused_host_tokens",
        "reused_store_tokens",
        "lookup_late",
        "ttft_ms",
        "output_token_ids",
        "output_text",
        "finish_reason",
    ),
    *("preemptions", "drafted_tokens", "accepted_tokens"),
]
TEXT = "the quick brown fox jumps over the lazy dog; " * 4
PATIENT = ("--lookup-timeout", "60s", "--no-overlap-loads")


def test_json_has_one_object_per_prompt_with_the_promised_fields(answer):
    objects = answer("--prompt", TEXT, "short")
    assert [list(each) for each in objects] == [FIELDS, FIELDS]
    first, second = objects
    assert (first["prompt_tokens"], second["prompt_tokens"]) == (len(TEXT), len("short"))
    assert first["computed_tokens"] == len(TEXT)
    assert len(first["output_token_ids"]) == 6
    assert first["finish_reason"] == "length"
    assert first["ttft_ms"] > 0
    assert first["request_id"] != second["request_id"]


def test_a_second_command_loads_what_the_first_one_stored(answer, tmp_path: Path):
    store = ("--store", f"disk://{tmp_path}/kv?capacity=16MiB", "--tokens-per-block", 16, *PATIENT)
    (cold,) = answer(*store, "--prompt", TEXT)
    (warm,) = answer(*store, "--prompt", TEXT)
    assert cold["reused_store_tokens"] == 0
    assert warm["reused_store_tokens"] == len(TEXT) - 1
    assert warm["computed_tokens"] == 1
    assert warm["output_token_ids"] == cold["output_token_ids"]


def test_prompts_come_from_files_and_from_standard_input(answer, tmp_path: Path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_text("from a file, héllo", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    objects = answer("--prompt-file", file, "-")
    assert [each["prompt_tokens"] for each in objects] == [19, 11]


def test_without_json_the_text_goes_to_standard_output_and_numbers_to_standard_error(
    kvconnect, answer, model: Path
):
    (expected,) = answer("--prompt", TEXT)
    arguments = ("--dtype", "float64", "--max-tokens", 6, "--ignore-eos", "--prompt", TEXT)
    code, out, err = kvconnect("generate", model, *arguments)
    assert code == 0
    assert out == expected["output_text"] + "\n"
    assert f"{len(TEXT)} prompt tokens: 0 reused from the device, 0 from the store" in err


SAMPLED = ("--temperature", 2, "--seed", 5, "--max-tokens", 120, "--ignore-eos", "--prompt", "x")
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def test_a_terminal_gets_no_control_characters_and_a_pipe_gets_the_answer(
    kvconnect, answer, model: Path, monkeypatch
):
    (expected,) = answer(*SAMPLED)
    assert CONTROLS.search(expected["output_text"])
    arguments = ("--dtype", "float64", *SAMPLED)
    _, piped, _ = kvconnect("generate", model, *arguments)
    assert piped == expected["output_text"] + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, shown, _ = kvconnect("generate", model, *arguments)
    assert not CONTROLS.search(shown)
    assert re.search(r"\\x[0-9a-f]{2}", shown)
    _, as_json, _ = kvconnect("generate", model, *arguments, "--json")
    assert json.loads(as_json)["output_text"] == expected["output_text"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one\ttwo\nthree\r\n é 語", "one\ttwo\nthree\r\n é 語"),
        ("\x1b[2J\x07\x00", r"\x1b[2J\x07\x00"),
        ("kept\rhidden", r"kept\x0dhidden"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
    ],
)
def test_what_a_terminal_shows(text, shown, monkeypatch):
    assert shown_on(sys.stdout, text) == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert shown_on(sys.stdout, text) == shown


def test_a_lookup_that_came_late_is_said(kvconnect, answer, model: Path, monkeypatch):
    (in_time,) = answer("--store", "memory:", "--prompt", TEXT)
    assert in_time["lookup_late"] is False
    looked_up = MemoryBackend.lookup

    async def slow(self, keys):
        await asyncio.sleep(0.2)
        return await looked_up(self, keys)

    monkeypatch.setattr(MemoryBackend, "lookup", slow)
    arguments = ("--store", "memory:", "--lookup-timeout", "1ms", "--prompt", TEXT)
    (late,) = answer(*arguments)
    assert late["lookup_late"] is True
    _, _, err = kvconnect("generate", model, *arguments)
    assert "0 from the store (its lookup came too late: --lookup-timeout)" in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--prompt", ""], "prompt: it is empty; at least one token is needed"),
        (["--prompt", "x", "--tokens-per-block", "24"], "tokens_per_block=24: must be a power"),
        (["--prompt", "x", "--store", "dsk:///x"], "'dsk' is unknown; did you mean 'disk'"),
        (["--prompt", "x", "--store", "memory:?capacity=1"], "capacity"),
        (["--prompt", "x", "--store", "memory:?capcity=1"], "did you mean 'capacity'"),
        (["--prompt", "x", "--dtype", "float23"], "dtype: 'float23' is unknown"),
        (["--prompt", "x", "--max-tokens", "-1"], "SamplingParams.max_tokens=-1"),
        (["--prompt", "x", "--salt", ""], "--salt: '' must not be empty"),
        (
            ["--prompt", "x", "--salt", "s" * 1025],
            "has 1,025 characters; give 1 to 1,024, or no salt",
        ),
        (["--prompt", "x", "--retention", "0:9"], "--retention 0:9: PART=PRIORITY"),
        (["--prompt", "x", "--retention", "system=9"], "where PART is decode or tokens such as"),
        (["--prompt", "x", "--retention", "0:9=101"], "priority=101"),
        (["--prompt", "x", "--retention", "0:9=50:2y"], "--retention 0:9=50:2y"),
        (["--prompt", "x", "--retention", "0:9=50", "5:=60"], "overlaps"),
        (["--prompt", "x", "--host-cache", "2GoB"], "--host-cache=2GoB"),
        (["--prompt", "x", "--max-attention-window", "0"], "max_attention_window"),
        (["--prompt", "x", "--num-draft-tokens", "3"], "needs --speculative ngram"),
        (["--prompt-file", "nowhere.txt"], "--prompt-file nowhere.txt: No such file"),
        (["--prompt", "x" * 100, "--kv-cache-tokens", "64"], "max_tokens=16 need 4"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(kvconnect, model, arguments, complaint):
    code, out, err = kvconnect("generate", model, *arguments)
    assert code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("kvconnect: error: ")
    assert complaint in line


def test_a_missing_model_is_named(kvconnect):
    code, _, err = kvconnect("generate", "nowhere", "--prompt", "x")
    assert code == 2
    assert err.startswith("kvconnect: error: ")
    assert "'nowhere' is not a directory" in err
    assert "Nothing is downloaded here: `hf download nowhere` does" in err


def test_a_file_that_is_no_text_is_named(kvconnect, model: Path, tmp_path: Path):
    file = tmp_path / "picture"
    file.write_bytes(b"\xff\xfe\x00")
    code, _, err = kvconnect("generate", model, "--prompt-file", file)
    assert code == 2
    assert f"--prompt-file {file}: is not UTF-8" in err


def test_a_prompt_is_required_and_given_in_one_way(kvconnect, model: Path):
    for arguments in ([], ["--prompt", "x", "--prompt-file", "y"]):
        code, _, err = kvconnect("generate", model, *arguments)
        assert code == 2
        assert "--prompt" in err


def test_a_store_with_codecs_serves_who_has_its_key(answer, kvconnect, model, tmp_path: Path):
    for name in ("ours", "theirs"):
        (tmp_path / name).write_text(name * 32)
    url = f"disk://{tmp_path}/kv?capacity=16MiB&codec=zstd+aes-gcm&key_file={tmp_path}/"
    run = ("--tokens-per-block", 16, *PATIENT, "--prompt", TEXT, "--store")
    (cold,) = answer(*run, url + "ours")
    (other,) = answer(*run, url + "theirs")
    (warm,) = answer(*run, url + "ours")
    assert [one["reused_store_tokens"] for one in (cold, other, warm)] == [0, 0, len(TEXT) - 1]
    assert warm["output_token_ids"] == cold["output_token_ids"]
    code, _, err = kvconnect("generate", model, *run, url + "nowhere")
    assert code == 2
    assert "nowhere: cannot be read: No such file" in err


def test_metrics_are_served_while_it_runs(answer, kvconnect, model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    scraped = []

    def scrape(event):
        if event.name == "engine.request":
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
                scraped.append(page.read().decode())

    remove = metrics.add_hook(scrape)
    try:
        answer("--prompt", "short", "--metrics-port", port)
    finally:
        remove()
    assert "kvconnect_prompt_tokens_total" in scraped[0]
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = kvconnect("generate", model, "--prompt", "x", "--metrics-port", port)
    assert code == 2
    assert f"metrics port {port}" in err


HOOKS = """
from kvconnect.connector.offload import OffloadScheduler


class Half(OffloadScheduler):
    def may_save(self, request, block):
        return block.number < 2
"""


def test_a_module_of_ones_own_decides_what_is_saved(answer, tmp_path: Path, monkeypatch):
    (tmp_path / "half_of_it.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    store = ("--store", f"disk://{tmp_path}/kv?capacity=1GiB", *PATIENT)
    classes = ("--connector-module", "half_of_it", "--connector-scheduler-class", "Half")
    answer("--prompt", TEXT, *store, *classes, "--tokens-per-block", 16)
    (again,) = answer("--prompt", TEXT, *store, "--tokens-per-block", 16)
    assert again["reused_store_tokens"] == 32
