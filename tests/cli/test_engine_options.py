"""Options of commands that run a model against the arguments of `LLM`: one list, one default."""

from __future__ import annotations

import argparse
from inspect import signature

import pytest

from kvconnect import LLM
from kvconnect.cli.commands import generate, serve

OTHERWISE = {"kv_cache", "connector", "speculative"}
"""Made of several options each."""

IN_PYTHON_ONLY = {"kv_cache_manager", "enable_chunked_prefill", "max_logprobs"}


@pytest.mark.parametrize(
    ("command", "others"), [(generate, {}), (serve, {"scheduling": "max_utilization"})]
)
def test_every_argument_of_the_engine_has_an_option_with_its_default(command, others):
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    arguments = vars(parser.parse_args(["MODEL", *(["--prompt", "x"] * (command is generate))]))
    defaults = {name: one.default for name, one in signature(LLM).parameters.items()}
    for name in OTHERWISE | IN_PYTHON_ONLY:
        del defaults[name]
    assert {name: arguments[name] for name in defaults} == {**defaults, "model": "MODEL", **others}
