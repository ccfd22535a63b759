"""Bad input: an error that names the field, the value and what would be right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import disk_url, open_llm

from kvconnect import (
    LLM,
    KvCacheConfig,
    KvCacheConnectorConfig,
    KvCacheRetentionConfig,
    SamplingParams,
    TokenRangeRetentionConfig,
)
from kvconnect.errors import ConfigurationError

OPENING: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "missing model directory": (
        lambda model, tmp: LLM(tmp / "nowhere"),
        r"model.*nowhere.*not a directory",
    ),
    "unknown URL scheme": (
        lambda model, tmp: LLM(model, connector="disc:///tmp/x"),
        r"'disc'.*'disk'",
    ),
    "peer without a port": (
        lambda model, tmp: LLM(model, connector="nixl://127.0.0.1?transport=tcp"),
        r"peer '127.0.0.1'.*host:port",
    ),
    "capacity below one block": (
        lambda model, tmp: LLM(model, connector=disk_url(tmp / "store", "4KiB")),
        r"capacity=4096.*one block takes",
    ),
    "unknown parameter of a URL": (
        lambda model, tmp: LLM(model, connector=f"disk://{tmp}/store?capcity=1GiB"),
        r"'capcity'.*'capacity'",
    ),
    "tokens_per_block": (
        lambda model, tmp: KvCacheConfig(tokens_per_block=24),
        r"tokens_per_block=24.*power of two",
    ),
    "unknown field": (
        lambda model, tmp: KvCacheConfig(token_per_block=32),
        r"'token_per_block'.*'tokens_per_block'",
    ),
    "overlapping retention ranges": (
        lambda model, tmp: KvCacheRetentionConfig(
            token_range_retention_configs=(
                TokenRangeRetentionConfig(token_start=0, token_end=64),
                TokenRangeRetentionConfig(token_start=30, token_end=128),
            )
        ),
        r"\[0, 64\).*overlaps.*\[30, 128\)",
    ),
    "empty retention range": (
        lambda model, tmp: TokenRangeRetentionConfig(token_start=64, token_end=32),
        r"token_end=32.*token_start=64",
    ),
    "priority": (
        lambda model, tmp: TokenRangeRetentionConfig(token_start=0, priority=101),
        r"priority=101",
    ),
    "connector with block reuse off": (
        lambda model, tmp: LLM(
            model, kv_cache=KvCacheConfig(enable_block_reuse=False), connector="memory:"
        ),
        r"enable_block_reuse=False.*connector",
    ),
    "half a connector": (
        lambda model, tmp: KvCacheConnectorConfig(connector_module="mine"),
        r"required together.*connector_scheduler_class",
    ),
    "no connector at all": (
        lambda model, tmp: LLM(model, connector=KvCacheConnectorConfig()),
        r"url",
    ),
    "no such connector module": (
        lambda model, tmp: LLM(
            model,
            connector=KvCacheConnectorConfig(
                connector_module="no_such_module",
                connector_scheduler_class="A",
                connector_worker_class="B",
            ),
        ),
        r"no_such_module",
    ),
    "no such connector class": (
        lambda model, tmp: LLM(
            model,
            connector=KvCacheConnectorConfig(
                connector_module="failing_connector",
                connector_scheduler_class="FailingSchedule",
                connector_worker_class="FailingWorker",
            ),
        ),
        r"FailingSchedule.*FailingScheduler",
    ),
    "dtype": (lambda model, tmp: LLM(model, dtype="float31"), r"'float31'.*'float32'"),
    "pool below one block": (
        lambda model, tmp: LLM(model, kv_cache=KvCacheConfig(max_gpu_total_bytes=100)),
        r"max_gpu_total_bytes",
    ),
    "staging below one block": (
        lambda model, tmp: LLM(
            model, connector=KvCacheConnectorConfig(url="memory:", staging_bytes=100)
        ),
        r"staging_bytes=100",
    ),
}


@pytest.mark.parametrize("case", OPENING)
def test_at_the_start(case: str, model: Path, tmp_path: Path) -> None:
    act, message = OPENING[case]
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        act(model, tmp_path)


PROMPTS: dict[str, tuple[object, SamplingParams, str]] = {
    "empty prompt": ([[]], SamplingParams(), r"prompt"),
    "empty text": ([""], SamplingParams(), r"prompt"),
    "prompt longer than the pool": ([[1] * 3000], SamplingParams(), r"3000|3015|max_tokens"),
    "prompt longer than the model": ([[1] * 9000], SamplingParams(), r"9000|8192"),
    "prompt and answer longer than the pool": (
        [[1] * 2000],
        SamplingParams(max_tokens=500),
        r"max_tokens",
    ),
    "token outside int32": ([[1, 1 << 40]], SamplingParams(), r"1099511627776"),
    "token outside the vocabulary": ([[1, 100_000]], SamplingParams(), r"100000"),
    "negative token": ([[1, -5]], SamplingParams(), r"-5"),
    "floats": ([[1.5, 2.5]], SamplingParams(), r"integers"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_in_a_request(case: str, model: Path) -> None:
    prompts, params, message = PROMPTS[case]
    with open_llm(model) as llm:
        with pytest.raises(ConfigurationError, match=message):
            llm.generate(prompts, params)  # type: ignore[arg-type]
        # Nothing is left of it, and the engine goes on.
        assert llm.stats().waiting_requests == 0
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].output_token_ids) <= 2


def test_an_empty_salt(model: Path) -> None:
    with open_llm(model) as llm, pytest.raises(ConfigurationError, match="cache_salt"):
        llm.generate([[1, 2, 3]], cache_salt="")


def test_a_closed_engine(model: Path) -> None:
    llm = open_llm(model)
    llm.close()
    llm.close()
    with pytest.raises(Exception, match="closed"):
        llm.generate([[1, 2, 3]])
