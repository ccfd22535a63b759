"""Settings that are checked when vLLM looks a connector's class up, before it loads weights."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

from kvconnect.errors import ConfigurationError
from kvconnect.integrations.vllm import callers
from kvconnect.integrations.vllm.configured import check_looked_up
from kvconnect.integrations.vllm_tier.settings import check_looked_up as check_tiers

URL = "disk:///nowhere/kv?capacity=1GiB"


def look_up(check: Callable[[], None], *, by: str = callers._CONFIGURATION, **extra: Any) -> None:
    """Calls `check` as vLLM's factory does for a connector with these settings, asked by `by`."""

    def get_connector_class(kv_transfer_config: Any, check: Callable[[], None]) -> None:
        check()

    def made(look: Callable[[Any, Callable[[], None]], None], *given: Any) -> None:
        look(*given)

    inside = FunctionType(get_connector_class.__code__, {"__name__": callers._FACTORY})
    caller = FunctionType(made.__code__, {"__name__": by})
    caller(inside, SimpleNamespace(kv_connector_extra_config=extra), check)


def look_up_tier(**settings: Any) -> None:
    of_vllm = {"type": "KvConnectTier", "module_path": "of.ours", "backpressure": {}}
    look_up(check_tiers, secondary_tiers=[{"type": "fs"}, of_vllm | settings])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": ""}, "url: is missing"),
        ({"url": URL, "lookup_timeout": 1}, "unknown field .?lookup_timeout"),
        ({"url": URL, "staging_bytes": -1}, "staging_bytes=-1"),
        ({"url": "dsik:///x"}, "store scheme 'dsik' is unknown"),
        ({"url": URL + "&capcity=1"}, "capcity"),
        ({"url": URL, "codec": "zst"}, "zst"),
    ],
    ids=lambda one: "" if isinstance(one, dict) else one,
)
def test_wrong_settings_are_refused_by_the_lookup(settings, said):
    for look in (lambda **given: look_up(check_looked_up, **given), look_up_tier):
        with pytest.raises(ConfigurationError, match=said):
            look(**settings)


def test_right_settings_and_other_lookups_pass_and_open_nothing():
    look_up(check_looked_up, url=URL, namespace="shared", model_revision="org/name@1")
    look_up_tier(url=URL, namespace="mine", locality="LOCAL")
    look_up(check_tiers)
    look_up(check_tiers, secondary_tiers="none")
    for check in (check_looked_up, check_tiers):
        check()


def test_engines_that_look_the_class_up_again_check_nothing():
    look_up(check_looked_up, by="vllm.v1.metrics.loggers", url="dsik:///x")
    look_up(check_tiers, by="vllm.v1.engine.core", secondary_tiers=[{"type": "KvConnectTier"}])
