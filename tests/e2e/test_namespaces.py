"""Engines find each other's blocks under one name of their namespace, and under no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import answer, connector, disk_url

from kvconnect import KvCacheConnectorConfig
from kvconnect.connector.io.identity import stored_as
from kvconnect.errors import ConfigurationError


def test_blocks_are_found_in_their_own_namespace_only(
    model: Path, expected: list[int], tmp_path: Path
) -> None:
    url = disk_url(tmp_path / "kv")
    answer(model, connector(url, namespace="shared"))
    for namespace in (None, "other"):
        apart = answer(model, connector(url, namespace=namespace))
        assert (list(apart.output_token_ids), apart.reused_store_tokens) == (expected, 0)
    again = answer(model, connector(url, namespace="shared"))
    assert (list(again.output_token_ids), again.computed_tokens) == (expected, 1)


def test_each_kind_of_engine_has_a_namespace_of_its_own_by_default() -> None:
    digest = bytes(32)
    config = KvCacheConnectorConfig(url="memory:")
    shared = KvCacheConnectorConfig(url="memory:", namespace="shared")
    assert stored_as(digest, config) == digest  # stores that are filled already stay of use
    assert len({digest, stored_as(digest, config, engine="a"), stored_as(digest, shared)}) == 3
    assert stored_as(digest, shared, engine="a") == stored_as(digest, shared, engine="b")


@pytest.mark.parametrize("namespace", ["", "x" * 257, "\udc00"])
def test_a_name_that_is_none_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigurationError, match="namespace"):
        KvCacheConnectorConfig(url="memory:", namespace=namespace)
