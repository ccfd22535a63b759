"""Engines whose stores encode blocks: right tokens, and no block of another codec or key."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import answer, connector, disk_url, open_llm

from kvconnect import KvCacheConnectorConfig
from kvconnect.backends import open_backend
from kvconnect.connector.io.identity import stored_as
from kvconnect.errors import ConfigurationError


@pytest.fixture
def key_files(tmp_path: Path) -> list[Path]:
    files = [tmp_path / name for name in ("one", "two")]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number + 1]) * 32)
    return files


def encoded(directory: Path, codec: str | None, key_file: Path | None = None):
    path = None if key_file is None else str(key_file)
    return connector(disk_url(directory), codec=codec, key_file=path)


@pytest.mark.parametrize("codec", ["zstd", "lz4", "zstd+aes-gcm"])
def test_lossless_codecs_change_no_token(
    model: Path, expected: list[int], tmp_path: Path, key_files: list[Path], codec: str
) -> None:
    config = encoded(tmp_path / "kv", codec, key_files[0] if "aes" in codec else None)
    assert list(answer(model, config).output_token_ids) == expected
    warm = answer(model, config)
    assert list(warm.output_token_ids) == expected
    assert warm.computed_tokens == 1  # the tail, found by its encrypted tokens, included


def test_compressed_blocks_are_found_by_engines_that_do_not_compress(
    model: Path, expected: list[int], tmp_path: Path
) -> None:
    answer(model, encoded(tmp_path / "kv", "zstd"))
    plain = answer(model, encoded(tmp_path / "kv", None))
    assert list(plain.output_token_ids) == expected
    assert plain.computed_tokens == 1


@pytest.mark.parametrize("codec", ["fp8", "int8+zstd"])
def test_rounded_blocks_are_for_engines_that_ask_for_them(
    model: Path, expected: list[int], tmp_path: Path, codec: str
) -> None:
    rounding = encoded(tmp_path / "kv", codec)
    assert list(answer(model, rounding).output_token_ids) == expected  # computed by itself
    exact = answer(model, encoded(tmp_path / "kv", None))
    assert (list(exact.output_token_ids), exact.reused_store_tokens) == (expected, 0)
    assert answer(model, rounding).computed_tokens == 1


def test_what_stands_for_the_model_in_keys(tmp_path: Path, key_files: list[Path]) -> None:
    digest = b"d" * 32

    def keyed(codec: str | None, key_file: Path | None = None, *, in_url: bool = False) -> bytes:
        if not in_url:
            return stored_as(digest, encoded(tmp_path, codec, key_file))
        url = f"{disk_url(tmp_path)}&codec={codec}"
        return stored_as(digest, KvCacheConnectorConfig(url=url))

    assert keyed(None) == keyed("zstd") == keyed("lz4", in_url=True) == stored_as(digest, None)
    assert keyed("fp8") == keyed("fp8", in_url=True) == keyed("fp8+zstd")
    guarded = open_backend(f"{disk_url(tmp_path)}&codec=fp8")
    assert stored_as(digest, KvCacheConnectorConfig(backend=guarded)) == keyed("fp8")
    assert (
        len({keyed(None), keyed("fp8"), keyed("int8"), *(keyed("aes-gcm", f) for f in key_files)})
        == 5
    )


def test_a_codec_that_cannot_be_used_stops_the_engine_from_starting(
    model: Path, tmp_path: Path
) -> None:
    for config, message in (
        (encoded(tmp_path, "zst"), "did you mean 'zstd'"),
        (encoded(tmp_path, "aes-gcm"), "needs key_file="),
        (encoded(tmp_path, "aes-gcm", tmp_path / "no"), "cannot be read"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            open_llm(model, config)
    with pytest.raises(ConfigurationError, match="not for your own classes"):
        KvCacheConnectorConfig(
            connector_module="m",
            connector_scheduler_class="s",
            connector_worker_class="w",
            codec="zstd",
        )
