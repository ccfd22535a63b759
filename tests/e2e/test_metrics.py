"""What an engine and its store tell Prometheus while they run."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from harness import PARAMS, PROMPT, disk_url, open_llm
from prometheus_client.parser import text_string_to_metric_families

from kvconnect.explain.outcome import Outcome
from kvconnect.prometheus import serve


def scrape(port: int) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (
                sample.name,
                *sorted(sample.labels[one] for one in sample.labels if one != "engine"),
            ): (sample.value)
            for family in families
            for sample in family.samples
        }


def test_a_run_with_a_store_is_told(model: Path, tmp_path: Path) -> None:
    url = disk_url(tmp_path / "store")
    store = ("DiskBackend", url.partition("?")[0])
    with serve(0, "127.0.0.1") as server:
        before = scrape(server.port)

        def grown(*name: str) -> float:
            return now[name] - before.get(name, 0)

        with open_llm(model, url) as llm:
            llm.generate([PROMPT], PARAMS)
        with open_llm(model, url) as llm:
            llm.generate([PROMPT], PARAMS)
            output = llm.generate([PROMPT], PARAMS)[0]
            now = scrape(server.port)
        after = scrape(server.port)
    assert grown("kvconnect_requests_total") == 3
    outcomes = {one: grown("kvconnect_prompt_tokens_total", one) for one in Outcome}
    assert sum(outcomes.values()) == 3 * len(PROMPT)
    assert grown("kvconnect_prompt_tokens_total", "unexplained") == 0
    assert outcomes[Outcome.REUSED] == output.reused_device_tokens + len(PROMPT) - 1
    assert outcomes[Outcome.LAST] == 3
    assert grown("kvconnect_hit_tokens_total", "store") == len(PROMPT) - 1
    assert grown("kvconnect_hit_tokens_total", "device") == output.reused_device_tokens
    assert grown("kvconnect_store_bytes_total", *store, "save") > 0
    assert grown("kvconnect_store_bytes_total", *store, "load") > 0
    assert grown("kvconnect_store_misses_total", *store) >= 1
    assert now["kvconnect_store_breaker_state", *store] == 0
    assert 0 < now["kvconnect_store_used_bytes", *store] <= 64 << 20
    assert now["kvconnect_store_capacity_bytes", *store] == 64 << 20
    assert now["kvconnect_staging_bytes", "free"] > 0
    assert now["kvconnect_device_blocks", "free"] > 0
    # What is closed is not told of any more; engines of other tests may be open.
    assert ("kvconnect_store_breaker_state", *store) not in after
    for gauge in (("kvconnect_staging_bytes", "free"), ("kvconnect_device_blocks", "free")):
        assert after.get(gauge) == before.get(gauge)
