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


def test_the_defaults_of_the_cache_are_those_of_the_reference():
    config = KvCacheConfig()
    assert config.enable_block_reuse
    assert config.enable_partial_reuse
    assert config.copy_on_partial_reuse
    assert config.tokens_per_block == 32
    assert config.dtype == "auto"
    assert config.free_gpu_memory_fraction == 0.9
    assert config.secondary_offload_min_priority == 35
    assert config.host_cache_size == 0
    assert config.event_buffer_max_size == 0
    assert config.max_tokens is None
    assert config.max_attention_window is None


def test_the_defaults_of_the_connector_are_those_of_the_specification():
    config = KvCacheConnectorConfig()
    assert config.lookup_timeout_ms == 20
    assert config.save_on == "full"
    assert config.on_backlog == "drop"
    assert config.verify_frames
    assert config.max_quarantined_fraction == 0.1


@pytest.mark.parametrize(
    ("settings", "values", "complaint"),
    [
        (KvCacheConfig, {"token_per_block": 32}, "did you mean 'tokens_per_block'"),
        (KvCacheConnectorConfig, {"uri": "disk:///x"}, "did you mean 'url'"),
        (KvCacheRetentionConfig, {"decode_priority": 1}, "decode_retention_priority"),
        (TokenRangeRetentionConfig, {"token_start": 0, "token_stop": 1}, "token_start"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_valid_one(settings, values, complaint):
    with pytest.raises(ConfigurationError, match=complaint) as caught:
        settings(**values)
    assert "unknown field" in str(caught.value)


@pytest.mark.parametrize("value", [-32, 0, 1, 3, 24, 33])
def test_tokens_per_block_is_a_power_of_two_above_one(value):
    with pytest.raises(ConfigurationError, match="power of two greater than 1") as caught:
        KvCacheConfig(tokens_per_block=value)
    assert f"tokens_per_block={value}" in str(caught.value)


@pytest.mark.parametrize("value", [2, 16, 32, 128])
def test_powers_of_two_are_fine(value):
    assert KvCacheConfig(tokens_per_block=value).tokens_per_block == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("free_gpu_memory_fraction", 0.0),
        ("free_gpu_memory_fraction", 1.0),
        ("host_cache_size", -1),
        ("secondary_offload_min_priority", 101),
        ("dtype", "fp9"),
        ("event_buffer_max_size", -1),
    ],
)
def test_a_bad_value_is_named_with_its_field(field, value):
    with pytest.raises(ConfigurationError, match=rf"KvCacheConfig\.{field}={value!r}"):
        KvCacheConfig(**{field: value})


@pytest.mark.parametrize("field", ["use_uvm", "sink_token_length", "transfer_mode"])
def test_a_field_without_effect_says_so(field):
    value = {"use_uvm": True, "sink_token_length": 4, "transfer_mode": 1}[field]
    with pytest.warns(FutureWarning, match=f"{field} is deprecated"):
        KvCacheConfig(**{field: value})


def test_settings_cannot_be_changed():
    with pytest.raises(ConfigurationError, match="frozen"):
        KvCacheConfig().tokens_per_block = 64


@pytest.mark.parametrize("priority", [-1, 101, 50.5, "high"])
def test_a_priority_is_a_whole_number_up_to_100(priority):
    with pytest.raises(ConfigurationError, match="decode_retention_priority"):
        KvCacheRetentionConfig(decode_retention_priority=priority)


def test_a_range_that_ends_before_it_starts_is_refused():
    with pytest.raises(ConfigurationError, match="token_end=4 must be greater than token_start=8"):
        TokenRangeRetentionConfig(token_start=8, token_end=4)


@pytest.mark.parametrize("duration", [0, -5, float("inf"), float("nan")])
def test_a_duration_is_positive_and_finite(duration):
    with pytest.raises(ConfigurationError, match="duration_ms"):
        TokenRangeRetentionConfig(token_start=0, duration_ms=duration)


def _ranges(*pairs: tuple[int, int | None]) -> KvCacheRetentionConfig:
    return KvCacheRetentionConfig(
        token_range_retention_configs=[
            TokenRangeRetentionConfig(token_start=start, token_end=end) for start, end in pairs
        ]
    )


def test_ranges_may_touch_and_come_in_any_order():
    assert len(_ranges((8, 16), (0, 8), (16, None)).token_range_retention_configs) == 3


@pytest.mark.parametrize("pairs", [((0, 9), (8, 16)), ((0, None), (8, 16)), ((0, 4), (0, 4))])
def test_ranges_that_overlap_are_refused(pairs):
    with pytest.raises(ConfigurationError, match="overlaps"):
        _ranges(*pairs)


@pytest.mark.parametrize(
    "given",
    [
        {"connector_module": "m"},
        {"connector_scheduler_class": "S"},
        {"connector_module": "m", "connector_worker_class": "W"},
    ],
)
def test_module_and_both_classes_are_required_together(given):
    with pytest.raises(ConfigurationError, match="required together; missing: connector_"):
        KvCacheConnectorConfig(**given)


def test_a_store_and_a_connector_of_ones_own_exclude_each_other():
    names = ("connector_module", "connector_scheduler_class", "connector_worker_class")
    with pytest.raises(ConfigurationError, match="url"):
        KvCacheConnectorConfig(**dict.fromkeys(names, "x"), url="disk:///x")


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


def test_too_many_values_without_a_name_are_refused_with_the_names():
    with pytest.raises(ConfigurationError, match="token_start, token_end, priority, duration_ms"):
        TokenRangeRetentionConfig(0, 4, 100, None, 1)
    with pytest.raises(ConfigurationError, match="without a name; possible without one: none"):
        KvCacheConfig(32)


def test_a_value_given_by_position_and_by_name_is_refused():
    with pytest.raises(ConfigurationError, match=r"token_start: was given twice"):
        TokenRangeRetentionConfig(0, token_start=1)


def test_a_duration_may_be_a_timedelta():
    given = TokenRangeRetentionConfig(0, 4, 100, timedelta(seconds=1.5))
    assert given.duration_ms == 1500
    assert KvCacheRetentionConfig(decode_duration_ms=timedelta(minutes=1)).decode_duration_ms == 6e4
    with pytest.raises(ConfigurationError, match="duration_ms"):
        TokenRangeRetentionConfig(0, 4, 100, timedelta(0))


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
