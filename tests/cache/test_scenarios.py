"""The cases of scenarios.json, which belong to the specification of the block manager."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvconnect import errors
from kvconnect.cache.block_manager import BlockManager
from kvconnect.config import KvCacheConfig, KvCacheRetentionConfig
from kvconnect.layout import KvCacheLayout

SCENARIOS = json.loads((Path(__file__).parent / "scenarios.json").read_text())["scenarios"]


def needs_later_feature(scenario):
    """Window pools and the host tier are refused so far."""
    config = scenario["config"]
    return isinstance(config.get("num_blocks"), dict) or bool(config.get("num_host_blocks"))


RUNNABLE = [s for s in SCENARIOS if not needs_later_feature(s)]
LATER = [s for s in SCENARIOS if needs_later_feature(s)]


class Orders:
    """A copier that writes down what it is asked for."""

    def __init__(self):
        self.names = []

    def copy_tokens(self, source, target, num_tokens):
        self.names.append("copy_tokens")


def spread(tokens):
    if isinstance(tokens, list):
        return tokens
    if "range" in tokens:
        return list(range(*tokens["range"]))
    if "fill" in tokens:
        token, count = tokens["fill"]
        return [token] * count
    return [token for part in tokens["cat"] for token in spread(part)]


def retention_of(given):
    if given is None:
        return None
    names = ("token_start", "token_end", "priority", "duration_ms")
    ranges = [dict(zip(names, entry, strict=False)) for entry in given["ranges"]]
    decode = dict(
        zip(
            ("decode_retention_priority", "decode_duration_ms"),
            given.get("decode", []),
            strict=False,
        )
    )
    return KvCacheRetentionConfig(token_range_retention_configs=ranges, **decode)


class Runner:
    """Drives one manager through the steps of a scenario."""

    def __init__(self, config):
        self.now = 0.0
        self.orders = Orders()
        self.ids = {}
        self.handles = {}
        self.labels = {}
        size = config.get("tokens_per_block", 4)
        names = ("enable_partial_reuse", "copy_on_partial_reuse", "secondary_offload_min_priority")
        settings = {name: config[name] for name in names if name in config}
        self.manager = BlockManager(
            KvCacheConfig(tokens_per_block=size, **settings),
            KvCacheLayout(1, 1, 1, 1, size, torch.float32),
            num_blocks=config.get("num_blocks", 8),
            copier=self.orders,
            clock=lambda: self.now,
        )

    def id_of(self, step):
        return self.ids.setdefault(step["id"], len(self.ids))

    def call(self, step):
        manager = self.manager
        where = {
            "cache_salt": step.get("salt"),
            "lora_id": step.get("lora"),
            "extra_key": step.get("extra"),
        }
        limits = {name: step[name] for name in ("max_matched", "first_chunk") if name in step}
        match step["op"]:
            case "add":
                retention = retention_of(step.get("retention"))
                tokens = spread(step["tokens"])
                added = manager.add_sequence(
                    self.id_of(step), tokens, retention=retention, **where, **limits
                )
                assert list(added.block_ids) == list(manager.block_ids(self.id_of(step)))
                return added.matched_tokens
            case "match":
                return manager.match(spread(step["tokens"]), **where)
            case "can_add":
                return manager.can_add(spread(step["tokens"]), **where, **limits)
            case "append":
                manager.append_tokens(self.id_of(step), spread(step["tokens"]))
            case "commit":
                manager.commit(self.id_of(step), step["n"])
            case "reserve":
                manager.reserve(self.id_of(step), step["n"])
            case "rewind":
                manager.rewind(self.id_of(step), step["n"])
            case "release":
                manager.release(self.id_of(step))
            case "abort":
                manager.abort(self.id_of(step), step["n"])
            case "pin":
                self.handles[step["handle"]] = manager.pin(self.id_of(step))
            case "detach":
                self.handles[step["handle"]] = manager.detach(self.id_of(step), step["n"])
            case "unpin":
                manager.unpin(self.handles[step["handle"]])
            case "reset":
                manager.reset()
            case "advance":
                self.now += step["seconds"]
            case "check":
                pass
            case unknown:
                pytest.fail(f"unknown op {unknown}")
        return None

    def step(self, step):
        expect = step.get("expect", {})
        self.orders.names.clear()
        if "error" in expect:
            kind = {"ValueError": ValueError, "*": errors.KvConnectError}.get(expect["error"])
            with pytest.raises(kind or getattr(errors, expect["error"])):
                self.call(step)
        else:
            self.compare(step, expect, self.call(step))
        self.manager.check_invariants()

    def compare(self, step, expect, returned):
        manager = self.manager
        for name, value in expect.items():
            match name:
                case "matched" | "fits":
                    assert returned == value
                case "blocks":
                    assert len(manager.block_ids(self.id_of(step))) == value
                case "free":
                    assert manager.num_free_blocks() == value
                case "allocated":
                    assert manager.num_allocated_blocks() == value
                case "max":
                    assert manager.max_blocks() == value
                case "orders":
                    assert self.orders.names == value
                case "ids":
                    self.compare_ids(value, manager.block_ids(self.id_of(step)))
                case unknown:
                    pytest.fail(f"unknown expectation {unknown}")

    def compare_ids(self, expected, ids):
        assert len(ids) == len(expected)
        for label, block in zip(expected, ids, strict=True):
            if label.startswith("!"):
                assert all(self.labels[other] != block for other in label[1:].split("!"))
            elif label != "*":
                assert self.labels.setdefault(label, block) == block


@pytest.mark.parametrize("scenario", RUNNABLE, ids=[s["name"] for s in RUNNABLE])
def test_scenario(scenario):
    runner = Runner(scenario["config"])
    for number, step in enumerate(scenario["steps"]):
        try:
            runner.step(step)
        except AssertionError as error:
            error.add_note(f"in step {number}: {step}")
            raise


@pytest.mark.skip(
    reason=f"{len(LATER)} scenarios need window pools or the host tier, refused so far"
)
def test_scenarios_of_window_pools_and_the_host_tier():
    assert not LATER
