"""The commands make-trace and simulate."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from kvconnect.cli.commands import simulate
from kvconnect.simulate.simulator import Simulator


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> str:
    """A synthetic trace of 300 requests."""
    from kvconnect.simulate.workload import Workload

    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text("".join(Workload(300, seed=3).lines()))
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from kvconnect.engine.checkpoint.random_model import make_model

    return make_model(tmp_path_factory.mktemp("simulate") / "model", "llama")


TWICE = [{"timestamp": t, "tokens": list(range(640)), "output_length": 0} for t in (0, 100_000)]


# ---------------------------------------------------------------- make-trace


def test_a_trace_is_written_and_not_overwritten_unless_told_to(kvconnect, tmp_path: Path):
    path = tmp_path / "t.jsonl"
    code, out, err = kvconnect("make-trace", path, "--requests", 20)
    assert (code, out) == (0, "")
    assert "20 requests" in err
    before = path.read_text()
    assert len(before.splitlines()) == 20
    code, _, err = kvconnect("make-trace", path, "--requests", 20, "--seed", 1)
    assert code == 2
    assert "--force" in err
    assert path.read_text() == before
    assert kvconnect("make-trace", path, "--requests", 20, "--seed", 1, "--force")[0] == 0
    assert path.read_text() != before


def test_standard_output_gets_the_trace_alone(kvconnect):
    code, out, err = kvconnect("make-trace", "-", "--requests", 3, "--mix", "chat=1")
    assert (code, err) == (0, "")
    assert [json.loads(line)["system_length"] for line in out.splitlines()] == [1024] * 3


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--mix", "chat"], "--mix chat: KIND=SHARE"),
        (["--mix", "chta=1"], "did you mean 'chat'"),
        (["--requests", 0], "num_requests: 0"),
    ],
)
def test_a_bad_option_leaves_no_trace(kvconnect, tmp_path, options, complaint):
    code, _, err = kvconnect("make-trace", tmp_path / "t", *options)
    assert code == 2
    assert complaint in err
    assert not (tmp_path / "t").exists()


# ---------------------------------------------------------------- simulate


def test_the_table_says_what_was_found(kvconnect, write_trace):
    path = write_trace(TWICE)
    code, out, err = kvconnect(
        "simulate", path, "--device-cache", "4MiB", "--bytes-per-token", 1024, "--external", "0"
    )
    assert (code, err) == (0, "")
    words = [" ".join(line.split()) for line in out.splitlines()]
    assert words[0] == f"{path}: 2 requests, 0:01:40"
    assert "prompts 1,280 100.0 %" in words
    assert "from device 639 49.9 %" in words
    assert "computed 641 50.1 %" in words
    assert "saved 639 49.9 %" in words
    assert "device 128 blocks (4 MiB); 32 tokens per block" in words
    assert "held at once: 20 blocks, 15.6 % of the device" in words
    assert "within the device 31 31 KiB" in words
    assert "0:00:00 1 640 0.0 % 0.0 % 0 0" in words
    assert any(line.startswith("0:01:3") and "99.8 %" in line for line in words)


def test_json_says_the_same(kvconnect, write_trace):
    path = write_trace(TWICE)
    options = (
        "--device-cache",
        "4096tok",
        "--external",
        "4096tok",
        "--bytes-per-token",
        10,
        "--json",
    )
    code, out, _ = kvconnect("simulate", path, *options)
    assert code == 0
    report = json.loads(out)
    (run,) = report["runs"]
    assert report["requests_read"] == run["total"]["requests"] == 2
    assert run["total"]["device_tokens"] == 639
    assert run["total"]["hit_rate"] == 639 / 1280
    assert run["moved_bytes"] == {
        "external_to_device": 0,
        "device_to_external": 6400,
        "within_the_device": 310,
    }
    for field in ("requests", "prompt_tokens", "device_tokens", "saved_blocks"):
        assert sum(row[field] for row in run["over_time"]) == run["total"][field]


def test_equal_runs_print_the_same(kvconnect, trace):
    options = ("simulate", trace, "--device-cache", "60ktok", "--external", "1Mtok")
    assert kvconnect(*options) == kvconnect(*options)


def test_more_cache_finds_no_less(kvconnect, trace):
    # One request at a time: then what a smaller cache holds, a larger one holds too.
    serving = ("--prefill-tokens-per-s", "inf", "--decode-tokens-per-s", "inf")
    sizes = "device=40ktok,50ktok,80ktok,160ktok,320ktok,1Mtok"
    code, out, _ = kvconnect("simulate", trace, "--sweep", sizes, "--json", *serving)
    assert code == 0
    report = json.loads(out)
    rates = [run["total"]["hit_rate"] for run in report["runs"]]
    assert [run["label"] for run in report["runs"]] == sizes.partition("=")[2].split(",")
    assert rates == sorted(rates)
    assert rates[0] + 0.2 < rates[-1]


def test_a_run_of_a_sweep_is_that_of_its_size_alone(kvconnect, trace):
    sizes = ("40ktok", "200ktok")
    _, swept, _ = kvconnect("simulate", trace, "--sweep", "device=" + ",".join(sizes), "--json")
    for size, run in zip(sizes, json.loads(swept)["runs"], strict=True):
        _, alone, _ = kvconnect("simulate", trace, "--device-cache", size, "--json")
        assert run["total"] == json.loads(alone)["runs"][0]["total"]


def test_a_sweep_of_another_tier_is_a_table_of_its_sizes(kvconnect, trace):
    options = ("--device-cache", "40ktok", "--sweep", "external=0,400ktok")
    code, out, _ = kvconnect("simulate", trace, *options)
    assert code == 0
    header, none, some = out.splitlines()[2:]
    assert header.split()[:4] == ["external", "tokens", "fit", "device"]
    assert none.split()[:2] == ["0", "0"]
    assert some.split()[:2] == ["400ktok", "400,000"]


STORE = ("--device-cache", "40ktok", "--external", "9Mtok", "--limit", 100)


def test_store_rates_add_a_table_and_change_nothing_else(kvconnect, trace):
    _, without, _ = kvconnect("simulate", trace, *STORE)
    code, out, err = kvconnect("simulate", trace, *STORE, "--store-rate", "2ktok,8ktok/s")
    assert (code, err) == (0, "")
    assert out.startswith(without[:-1] + "\n\n")
    head, titles, *rows = out[len(without) + 1 :].splitlines()
    assert "tokens in the store" in head
    assert titles.split()[-3:] == ["compute", "load", "both"]
    assert [row.split("  ")[0] or row.split("  ")[1] for row in rows] == [
        "computed alone",
        *("store at 2ktok/s", "loaded alone", "better of the two", "both meeting"),
        *("store at 8ktok/s", "loaded alone", "better of the two", "both meeting"),
    ]


def test_json_times_the_first_token_only_if_asked(kvconnect, trace):
    _, without, _ = kvconnect("simulate", trace, *STORE, "--json")
    options = ("--store-rate", "2000B,8000B", "--bytes-per-token", 1, "--store-first-byte", "500ms")
    code, out, _ = kvconnect("simulate", trace, *STORE, "--json", *options)
    assert code == 0
    (run,) = json.loads(out)["runs"]
    slow, fast = run.pop("first_token")
    (plain,) = json.loads(without)["runs"]
    assert {**run, "moved_bytes": None} == plain
    assert (slow["label"], slow["load_tokens_per_s"], slow["store_first_byte_s"]) == (
        "2000B",
        2000,
        0.5,
    )
    assert sum(slow["decisions"].values()) == sum(fast["decisions"].values()) > 20
    assert slow["computed"] == fast["computed"]
    for kind in ("mean", "median", "p90", "total"):
        assert slow["both"][kind] <= slow["better"][kind] <= slow["loaded"][kind]
        assert fast["both"][kind] <= slow["both"][kind]


def test_each_run_of_a_sweep_has_times(kvconnect, trace):
    options = ("--sweep", "external=0,9Mtok", "--store-rate", "8ktok", "--limit", 100)
    code, out, _ = kvconnect("simulate", trace, "--device-cache", "40ktok", *options)
    assert code == 0
    _, _, none, some = out.split("\n\n")
    assert none == "external 0: no prompt had a part in the store"
    assert some.startswith("external 9Mtok: ")


def test_only_the_first_requests_are_read_if_asked(kvconnect, trace):
    _, out, _ = kvconnect("simulate", trace, "--device-cache", "1Mtok", "--limit", 7, "--json")
    assert json.loads(out)["requests_read"] == 7


def test_bytes_per_token_come_from_a_models_configuration(kvconnect, trace, model):
    (model / "model.safetensors").unlink()  # the weights are not needed
    options = ("--device-cache", "64MiB", "--model", model, "--json", "--limit", 3)
    code, out, err = kvconnect("simulate", trace, *options)
    assert code == 0, err
    report = json.loads(out)
    # Two layers of two heads of 16 elements, keys and values, float32.
    config = json.loads((model / "config.json").read_text())
    heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    assert report["bytes_per_token"] == layers * heads * head_dim * 2 * 4


def test_of_a_model_with_latents_the_latents_are_counted(tmp_path):
    from kvconnect.engine.checkpoint.random_model import make_model
    from kvconnect.simulate.model_size import token_nbytes

    model = make_model(tmp_path, "deepseek_v3")
    assert token_nbytes(model) == 2 * (32 + 8) * 4  # layers, rank and turned elements, float32


def test_the_first_ctrl_c_prints_what_there_is(kvconnect, trace, monkeypatch):
    arrive = Simulator.arrive

    def interrupted(self, request):
        arrive(self, request)
        if request.line == 20:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Simulator, "arrive", interrupted)
    before = signal.getsignal(signal.SIGINT)
    code, out, _ = kvconnect("simulate", trace, "--device-cache", "1Mtok", "--json")
    assert code == 130
    report = json.loads(out)
    assert (report["requests_read"], report["interrupted"]) == (20, True)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_it_at_once(kvconnect, trace, monkeypatch):
    def interrupted(self, request):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Simulator, "arrive", interrupted)
    assert kvconnect("simulate", trace, "--device-cache", "1Mtok")[:2] == (130, "")


# ---------------------------------------------------------------- plots


@pytest.mark.parametrize(
    ("name", "magic", "options"),
    [
        (
            *("a.svg", b"<?xml"),
            ("--device-cache", "1GiB", "--external", "9GiB", "--bytes-per-token", 9999),
        ),
        ("b.png", b"\x89PNG\r\n", ("--sweep", "device=40ktok,80ktok,400ktok")),
        ("c.png", b"\x89PNG\r\n", ("--device-cache", "60ktok", "--sweep", "external=0,400ktok")),
    ],
)
def test_a_picture_is_written(kvconnect, trace, tmp_path: Path, name, magic, options):
    path = tmp_path / name
    code, _, err = kvconnect("simulate", trace, *options, "--limit", 50, "--plot", path)
    assert code == 0, err
    assert path.read_bytes().startswith(magic)


def test_a_missing_matplotlib_is_named_before_the_work(kvconnect, trace, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(simulate, "_simulate", None)
    code, out, err = kvconnect(
        "simulate", trace, "--device-cache", "1Mtok", "--plot", tmp_path / "a.png"
    )
    assert (code, out) == (2, "")
    assert "pip install '.[plot]'" in err


# ---------------------------------------------------------------- mistakes

STORED = ("--device-cache", "1Mtok", "--external", "9Mtok")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([], "--device-cache: is needed"),
        (["--device-cache", "500"], "--device-cache=500: has no unit"),
        (["--device-cache", "1GiB"], "--bytes-per-token or --model DIR"),
        (["--device-cache", "1KiB", "--bytes-per-token", "4096"], "not even one block fits"),
        (
            ["--device-cache", "1GiB", "--bytes-per-token", "0"],
            "--bytes-per-token 0: must be at least",
        ),
        (["--device-cache", "1Mtok", "--sweep", "device=2Mtok"], "--sweep gives its sizes"),
        (["--sweep", "device"], "TIER=SIZE"),
        (["--sweep", "disk=1Mtok"], "TIER=SIZE"),
        (["--sweep", "device=1Mtok,"], "a size such as"),
        (["--device-cache", "1Mtok", "--tokens-per-block", "24"], "tokens_per_block"),
        (
            ["--device-cache", "1Mtok", "--offload-min-priority", "101"],
            "secondary_offload_min_priority",
        ),
        (["--device-cache", "1Mtok", "--prefill-tokens-per-s", "0"], "prefill_tokens_per_s"),
        (["--device-cache", "1Mtok", "--limit", "0"], "--limit 0: must be at least"),
        (
            ["--device-cache", "1Mtok", "--store-rate", "8ktok"],
            "there is no store; give --external",
        ),
        ([*STORED, "--store-rate", "8000"], "--store-rate=8000: has no unit"),
        ([*STORED, "--store-rate", "8ktok,"], "--store-rate=: a size such as"),
        ([*STORED, "--store-rate", "0"], "store_rate: 0 must be above 0"),
        ([*STORED, "--store-rate", "1GiB"], "--store-rate=1GiB: bytes need the size of a token"),
        ([*STORED, "--store-first-byte", "1s"], "--store-first-byte 1.0: needs --store-rate"),
        ([*STORED, "--step-tokens", "0"], "--step-tokens 0: needs --store-rate"),
        ([*STORED, "--store-rate", "8ktok", "--step-tokens", "0"], "step_tokens: 0"),
        ([*STORED, "--store-rate", "8ktok", "--step-s", "-1"], "step_s: -1.0 must be"),
        ([*STORED, "--store-rate", "8ktok", "--store-first-byte-s", "nan"], "first_byte_s: nan"),
        (["--device-cache", "1Mtok", "--hash-tokens", "7"], "hash tokens: 7"),
        (["--device-cache", "1Mtok", "--hash-tokens", "16"], ":1: hash_ids: "),
        (["--device-cache", "1Mtok", "--retention", "system"], "PART=PRIORITY"),
        (
            ["--device-cache", "1Mtok", "--retention-file", "nowhere"],
            "--retention-file nowhere: No such",
        ),
        (
            ["--device-cache", "1Mtok", "--model", "nowhere"],
            "--model nowhere: there is no config.json",
        ),
        (
            ["--device-cache", "1Mtok", "--plot", "nowhere/a.png"],
            "--plot nowhere/a.png: there is no",
        ),
        (["--device-cache", "1Mtok", "--plot", "a.gif"], "must end in .png"),
    ],
)
def test_a_mistake_is_one_line(kvconnect, trace, options, complaint):
    code, out, err = kvconnect("simulate", trace, *options)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert complaint in line


def test_an_empty_trace_is_refused(kvconnect, write_trace):
    code, _, err = kvconnect("simulate", write_trace([""]), "--device-cache", "1Mtok")
    assert code == 2
    assert "holds no request" in err
