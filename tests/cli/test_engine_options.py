"""Options of commands that run a model: what the engine is made of, and what it is asked."""

from __future__ import annotations

import argparse
import functools
from inspect import signature

import pytest

from kvconnect import LLM, KvCacheConfig, KvCacheRetentionConfig, TokenRangeRetentionConfig
from kvconnect.cli.commands import generate, serve
from kvconnect.cli.options.engine_options import events_of
from kvconnect.config import DEFAULT_SCHEDULING
from kvconnect.engine import llm as module
from kvconnect.engine.sampling.drafts import NgramSpeculation
from kvconnect.errors import ConfigurationError

OTHERWISE = {"kv_cache", "connector", "speculative", "events"}
"""Made of several options each."""
IN_PYTHON_ONLY = {"kv_cache_manager", "enable_chunked_prefill", "max_logprobs"}


@pytest.mark.parametrize(
    ("command", "others"),
    [(generate, {"scheduling": DEFAULT_SCHEDULING}), (serve, {"scheduling": "max_utilization"})],
)
def test_every_argument_of_the_engine_has_an_option_with_its_default(command, others):
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    arguments = vars(parser.parse_args(["MODEL", *(["--prompt", "x"] * (command is generate))]))
    defaults = {name: one.default for name, one in signature(LLM).parameters.items()}
    for name in OTHERWISE | IN_PYTHON_ONLY:
        del defaults[name]
    assert {name: arguments[name] for name in defaults} == {**defaults, "model": "MODEL", **others}


def test_a_connector_of_ones_own_stands_beside_a_store_or_alone(given):
    classes = ("--connector-module", "hooks", "--connector-scheduler-class", "Mine")
    config = given("--store", "memory:", "--min-priority", "50", *classes)["connector"]
    assert (config.url, config.min_priority) == ("memory:", 50)
    assert (config.connector_module, config.connector_scheduler_class) == ("hooks", "Mine")
    alone = given(*classes, "--connector-worker-class", "Other")["connector"]
    assert (alone.url, alone.connector_worker_class) == (None, "Other")


def test_half_a_connector_without_a_store_is_refused(kvconnect, model):
    given = ("--connector-module", "hooks", "--connector-worker-class", "Other")
    code, _, err = kvconnect("generate", model, "--prompt", "x", *given)
    assert code == 2
    assert "required together; missing: connector_scheduler_class" in err


@pytest.fixture
def given(kvconnect, model, monkeypatch):
    """Runs `generate`; returns by name what the engine is given, and with the first prompt."""
    found = {}

    class Recording(LLM):
        @functools.wraps(LLM.__init__)
        def __init__(self, **arguments):
            found.update(arguments)

        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing was opened."""

        def submit(self, prompt, sampling, **named):
            found.update(dict(sampling), prompt=prompt, **named)
            raise ConfigurationError("that is all")

    def run(*arguments: object) -> dict[str, object]:
        monkeypatch.setattr(module, "LLM", Recording)
        code, _, err = kvconnect("generate", model, "--prompt", "x", *arguments)
        assert (code, err) == (2, "kvconnect: error: that is all\n")
        return found

    return run


CACHE = (
    *("--tokens-per-block", 16, "--kv-cache-tokens", 224, "--kv-cache-dtype", "fp8"),
    *("--host-cache", "64MiB", "--max-attention-window", 4096, 8),
)
RETENTION = ("--retention", "0:16=90:30s", "32:=10", "decode=5:1m")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--temperature", 1.5, "--seed", 5), {"temperature": 1.5, "seed": 5}),
        (("--top-k", 50, "--top-p", 0.95), {"top_k": 50, "top_p": 0.95}),
        (("--presence-penalty", 1.9), {"presence_penalty": 1.9}),
        (("--frequency-penalty", 1.9), {"frequency_penalty": 1.9}),
        (("--repetition-penalty", 1.9), {"repetition_penalty": 1.9}),
        (("--min-tokens", 6, "--stop", "a", "b"), {"min_tokens": 6, "stop": ("a", "b")}),
        (("--n", 3, "--temperature", 1, "--logprobs", 2), {"n": 3, "logprobs": 2}),
        (("--salt", "one"), {"cache_salt": "one"}),
        (("--scheduling", "max_utilization"), {"scheduling": "max_utilization"}),
        (("--speculative", "ngram"), {"speculative": NgramSpeculation()}),
        (
            ("--speculative", "ngram", "--num-draft-tokens", 3),
            {"speculative": NgramSpeculation(num_draft_tokens=3)},
        ),
        (
            CACHE,
            {
                "kv_cache": KvCacheConfig(
                    tokens_per_block=16,
                    max_tokens=224,
                    dtype="fp8",
                    host_cache_size=64 << 20,
                    max_attention_window=(4096, 8),
                )
            },
        ),
        (
            RETENTION,
            {
                "retention": KvCacheRetentionConfig(
                    token_range_retention_configs=(
                        TokenRangeRetentionConfig(0, 16, 90, 30_000),
                        TokenRangeRetentionConfig(32, None, 10),
                    ),
                    decode_retention_priority=5,
                    decode_duration_ms=60_000,
                )
            },
        ),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) else "",
)
def test_an_option_reaches_the_engine(given, arguments, expected):
    found = given(*arguments)
    assert {name: found[name] for name in expected} == expected


def test_events_are_published_where_the_options_say():
    parser = argparse.ArgumentParser()
    serve.add_options(parser)
    plain = parser.parse_args(["MODEL"])
    assert events_of(plain) is None
    given = ["--events", "tcp://*:5557", "--events-topic", "kv", "--events-buffer", "7"]
    found = events_of(parser.parse_args(["MODEL", *given]))
    assert (found.endpoint, found.replay) == ("tcp://*:5557", "tcp://*:5558")
    assert (found.topic, found.buffer_steps) == ("kv", 7)
    with pytest.raises(ConfigurationError, match="need --events"):
        events_of(parser.parse_args(["MODEL", *given[2:]]))
