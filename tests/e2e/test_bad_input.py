"""Bad input: an error that names the field, the value and what would be right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import open_llm

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.errors import ConfigurationError


def own(module: str, scheduler: str) -> KvCacheConnectorConfig:
    return KvCacheConnectorConfig(
        connector_module=module,
        connector_scheduler_class=scheduler,
        connector_worker_class="FailingWorker",
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"connector": "disc:///tmp/x"}, r"'disc'.*'disk'"),
        ({"connector": "nixl://127.0.0.1?transport=tcp"}, r"peer '127.0.0.1'.*host:port"),
        ({"connector": "disk://{tmp}/kv?capacity=4KiB"}, r"capacity=4096.*one block takes"),
        ({"connector": "disk://{tmp}/kv?capcity=1GiB"}, r"'capcity'.*'capacity'"),
        (
            {"connector": "memory:", "kv_cache": KvCacheConfig(enable_block_reuse=False)},
            r"enable_block_reuse=False.*connector",
        ),
        ({"connector": KvCacheConnectorConfig()}, r"url"),
        ({"connector": own("no_such_module", "A")}, r"no_such_module"),
        (
            {"connector": own("failing_connector", "FailingSchedule")},
            r"FailingSchedule.*FailingScheduler",
        ),
        (
            {"connector": KvCacheConnectorConfig(url="memory:", staging_bytes=100)},
            r"staging_bytes=100",
        ),
        ({"dtype": "float31"}, r"'float31'.*'float32'"),
        ({"kv_cache": KvCacheConfig(max_gpu_total_bytes=100)}, r"max_gpu_total_bytes"),
    ],
)
def test_at_the_start(model: Path, tmp_path: Path, given: dict[str, object], message: str) -> None:
    url = given.get("connector")
    if isinstance(url, str):
        given = given | {"connector": url.replace("{tmp}", str(tmp_path))}
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        LLM(model, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[LLM]:
    with open_llm(model) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 16, "prompt"),
        ("", 16, "prompt"),
        ([1] * 3000, 16, "3000|3015|max_tokens"),
        ([1] * 9000, 16, "9000|8192"),
        ([1] * 2000, 500, "max_tokens"),
        ([1, 1 << 40], 16, "1099511627776"),
        ([1, 100_000], 16, "100000"),
        ([1, -5], 16, "-5"),
        ([1.5, 2.5], 16, "integers"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_in_a_request(engine: LLM, prompt: object, max_tokens: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        engine.generate([prompt], SamplingParams(max_tokens=max_tokens))  # type: ignore[arg-type]
    # Nothing is left of it, and the engine goes on.
    assert engine.stats().waiting_requests == 0
    assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].output_token_ids) <= 2


def test_a_closed_engine(model: Path) -> None:
    llm = open_llm(model)
    llm.close()
    llm.close()
    with pytest.raises(Exception, match="closed"):
        llm.generate([[1, 2, 3]])
