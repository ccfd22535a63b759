"""Settings: defaults as documented, and errors that name field, value and remedy."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch

from kvconnect.config import (
    KvCacheConfig,
    KvCacheConnectorConfig,
    KvCacheRetentionConfig,
    TokenRangeRetentionConfig,
    torch_dtype,
)
from kvconnect.errors import ConfigurationError

CACHE_DEFAULTS = {
    "enable_block_reuse": True,
    "enable_partial_reuse": True,
    "copy_on_partial_reuse": True,
    "tokens_per_block": 32,
    "dtype": "auto",
    "free_gpu_memory_fraction": 0.9,
    "secondary_offload_min_priority": 35,
    "host_cache_size": 0,
    "event_buffer_max_size": 0,
    "max_tokens": None,
    "max_attention_window": None,
}
CONNECTOR_DEFAULTS = {
    "lookup_timeout_ms": 20,
    "save_on": "full",
    "on_backlog": "drop",
    "verify_frames": True,
    "max_quarantined_fraction": 0.1,
}


@pytest.mark.parametrize(
    ("settings", "defaults"),
    [(KvCacheConfig, CACHE_DEFAULTS), (KvCacheConnectorConfig, CONNECTOR_DEFAULTS)],
)
def test_defaults_are_those_of_the_documents(settings, defaults):
    assert {name: getattr(settings(), name) for name in defaults} == defaults


def ranges(*pairs: tuple[int, int | None]) -> dict[str, object]:
    return {
        "token_range_retention_configs": [
            TokenRangeRetentionConfig(token_start=start, token_end=end) for start, end in pairs
        ]
    }


CLASSES = ("connector_module", "connector_scheduler_class", "connector_worker_class")


@pytest.mark.parametrize(
    ("settings", "values", "complaint"),
    [
        (KvCacheConfig, {"token_per_block": 32}, "unknown field.*did you mean 'tokens_per_block'"),
        (KvCacheConnectorConfig, {"uri": "disk:///x"}, "unknown field.*did you mean 'url'"),
        (KvCacheRetentionConfig, {"decode_priority": 1}, "unknown.*decode_retention_priority"),
        (TokenRangeRetentionConfig, {"token_start": 0, "token_stop": 1}, "unknown.*token_start"),
        *(
            (KvCacheConfig, {"tokens_per_block": value}, f"={value}.*power of two greater than 1")
            for value in (-32, 0, 1, 3, 24, 33)
        ),
        *(
            (KvCacheConfig, {field: value}, rf"KvCacheConfig\.{field}={value!r}")
            for field, value in (
                ("max_tokens", 0),
                ("free_gpu_memory_fraction", 0.0),
                ("free_gpu_memory_fraction", 1.0),
                ("host_cache_size", -1),
                ("secondary_offload_min_priority", 101),
                ("dtype", "fp9"),
                ("event_buffer_max_size", -1),
            )
        ),
        *(
            (KvCacheRetentionConfig, {"decode_retention_priority": value}, "retention_priority")
            for value in (-1, 101, 50.5, "high")
        ),
        *(
            (TokenRangeRetentionConfig, {"token_start": 0, "duration_ms": value}, "duration_ms")
            for value in (0, -5, float("inf"), float("nan"), timedelta(0))
        ),
        (
            TokenRangeRetentionConfig,
            {"token_start": 8, "token_end": 4},
            "token_end=4 must be greater than token_start=8",
        ),
        (KvCacheRetentionConfig, ranges((0, 9), (8, 16)), "overlaps"),
        (KvCacheRetentionConfig, ranges((0, None), (8, 16)), "overlaps"),
        (KvCacheRetentionConfig, ranges((0, 4), (0, 4)), "overlaps"),
        (KvCacheConnectorConfig, {CLASSES[0]: "m"}, "required together; missing: connector_"),
        (KvCacheConnectorConfig, {CLASSES[1]: "S"}, "required together; missing: connector_"),
        (
            KvCacheConnectorConfig,
            {CLASSES[0]: "m", CLASSES[2]: "W"},
            "required together; missing: connector_",
        ),
        (
            KvCacheConnectorConfig,
            {CLASSES[0]: "m", "url": "disk:///x"},
            "connector_module is required together with connector_scheduler_class or",
        ),
        (
            KvCacheConnectorConfig,
            {CLASSES[1]: "S", CLASSES[2]: "W", "url": "disk:///x"},
            "or both; missing: connector_module",
        ),
        (
            KvCacheConnectorConfig,
            dict.fromkeys(CLASSES, "x") | {"codec": "zstd"},
            "not for your own classes",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(settings, values, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        settings(**values)


@pytest.mark.parametrize("field", ["use_uvm", "sink_token_length", "transfer_mode"])
def test_a_field_without_effect_says_so(field):
    value = {"use_uvm": True, "sink_token_length": 4, "transfer_mode": 1}[field]
    with pytest.warns(FutureWarning, match=f"{field} is deprecated"):
        KvCacheConfig(**{field: value})


def test_settings_cannot_be_changed():
    with pytest.raises(ConfigurationError, match="frozen"):
        KvCacheConfig().tokens_per_block = 64


def test_ranges_may_touch_and_come_in_any_order():
    config = KvCacheRetentionConfig(**ranges((8, 16), (0, 8), (16, None)))
    assert len(config.token_range_retention_configs) == 3


def test_a_dtype_name_is_looked_up_or_explained():
    assert torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ConfigurationError, match="did you mean 'float16'"):
        torch_dtype("flot16")


def test_a_range_may_be_given_by_position_as_in_the_documents():
    given = KvCacheRetentionConfig.TokenRangeRetentionConfig(0, 4, 100, None)
    named = TokenRangeRetentionConfig(token_start=0, token_end=4, priority=100, duration_ms=None)
    assert given == named
    assert isinstance(given, TokenRangeRetentionConfig)
    config = KvCacheRetentionConfig([given], 20, 500)
    assert config.token_range_retention_configs == (named,)
    assert (config.decode_retention_priority, config.decode_duration_ms) == (20, 500)
    with pytest.raises(ConfigurationError, match="token_start, token_end, priority, duration_ms"):
        TokenRangeRetentionConfig(0, 4, 100, None, 1)
    with pytest.raises(ConfigurationError, match="without a name; possible without one: none"):
        KvCacheConfig(32)
    with pytest.raises(ConfigurationError, match=r"token_start: was given twice"):
        TokenRangeRetentionConfig(0, token_start=1)


def test_a_duration_may_be_a_timedelta():
    given = TokenRangeRetentionConfig(0, 4, 100, timedelta(seconds=1.5))
    assert given.duration_ms == 1500
    assert KvCacheRetentionConfig(decode_duration_ms=timedelta(minutes=1)).decode_duration_ms == 6e4


def test_the_decode_policy_has_two_names():
    config = KvCacheRetentionConfig(decode_retention_policy=70)
    assert config == KvCacheRetentionConfig(decode_retention_priority=70)
    assert config.decode_retention_policy == config.decode_retention_priority == 70
    for args, given in (((), {"decode_retention_priority": 1}), (([], 1), {})):
        with pytest.raises(ConfigurationError, match="'decode_retention_policy' is the same"):
            KvCacheRetentionConfig(*args, **given, decode_retention_policy=1)


def test_a_retention_takes_a_transfer_mode_and_says_that_it_has_no_effect():
    assert KvCacheRetentionConfig(transfer_mode=0).transfer_mode == 0  # the default, no warning
    with pytest.warns(
        FutureWarning, match=r"KvCacheRetentionConfig.transfer_mode is dep"
    ) as caught:
        KvCacheRetentionConfig(transfer_mode=1)
    assert [Path(one.filename).name for one in caught] == ["test_config.py"]
