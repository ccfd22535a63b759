"""The cases of scenarios.json, which belong to the specification of the block manager.

The naive model runs them as well: so it is known to follow the specification, wherever that gives
an example.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from naive_manager import NaiveManager

from kvconnect import errors
from kvconnect.cache.block_manager import BlockManager
from kvconnect.config import KvCacheConfig, KvCacheRetentionConfig
from kvconnect.layout import KvCacheLayout

SCENARIOS = json.loads((Path(__file__).parent / "scenarios.json").read_text())["scenarios"]


COUNTS = {"free": "num_free_blocks", "allocated": "num_allocated_blocks", "max": "max_blocks"}


class Orders:
    """A copier that writes down what it is asked for, block by block."""

    def __init__(self):
        self.names = []

    def onboard(self, group, host_ids, ids):
        self.names += ["onboard"] * len(ids)

    def offload(self, group, ids, host_ids):
        self.names += ["offload"] * len(ids)

    def copy_tokens(self, group, source, target, num_tokens, *, from_host=False):
        self.names.append("copy_tokens")


def by_window(counts):
    """``{window: count}`` of a number, which means full attention, or of an object."""
    given = counts if isinstance(counts, dict) else {"full": counts}
    return {window_of(name): count for name, count in given.items()}


def window_of(name):
    return None if name == "full" else int(name)


def real_manager(config, num_blocks, num_host_blocks, clock, copier):
    layout = KvCacheLayout(1, 1, 1, 1, config.tokens_per_block, torch.float32)
    return BlockManager(
        config,
        layout,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        copier=copier,
        clock=clock,
    )


def naive_manager(config, num_blocks, num_host_blocks, clock, copier):
    return NaiveManager(config, num_blocks, num_host_blocks, clock=clock, copier=copier)


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
    names = ("decode_retention_priority", "decode_duration_ms")
    decode = dict(zip(names, given.get("decode", []), strict=False))
    return KvCacheRetentionConfig(token_range_retention_configs=ranges, **decode)


class Runner:
    """Drives one manager through the steps of a scenario."""

    def __init__(self, config, make):
        self.now = 0.0
        self.orders = Orders()
        self.ids = {}
        self.handles = {}
        self.labels = {}
        size = config.get("tokens_per_block", 4)
        names = ("enable_partial_reuse", "copy_on_partial_reuse", "secondary_offload_min_priority")
        settings = {name: config[name] for name in names if name in config}
        num_blocks = by_window(config.get("num_blocks", 8))
        num_host_blocks = by_window(config.get("num_host_blocks", 0))
        self.manager = make(
            KvCacheConfig(tokens_per_block=size, **settings),
            num_blocks,
            {window: num_host_blocks.get(window, 0) for window in num_blocks},
            lambda: self.now,
            self.orders,
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
            case "commit" | "reserve" | "rewind" | "abort" as name:
                getattr(manager, name)(self.id_of(step), step["n"])
            case "release":
                manager.release(self.id_of(step))
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
                case "free" | "allocated" | "max":
                    count = getattr(manager, COUNTS[name])
                    for window, number in by_window(value).items():
                        assert count(window=window) == number, f"window {window}"
                case "orders" if isinstance(value, dict):
                    for order, count in value.items():
                        assert self.orders.names.count(order) == count
                case "orders":
                    assert self.orders.names == value
                case "ids":
                    self.compare_ids(value, manager.block_ids(self.id_of(step)), "group 0")
                case "window_ids":
                    for window, labels in value.items():
                        ids = manager.block_ids(self.id_of(step), window=window_of(window))
                        self.compare_ids(labels, ids, window)
                case unknown:
                    pytest.fail(f"unknown expectation {unknown}")

    def compare_ids(self, expected, ids, pool):
        assert len(ids) == len(expected)
        for label, block in zip(expected, ids, strict=True):
            if label == "-1":
                assert block == -1
                continue
            assert block >= 0
            if label.startswith("!"):
                assert all(self.labels[pool, other] != block for other in label[1:].split("!"))
            elif label != "*":
                assert self.labels.setdefault((pool, label), block) == block


@pytest.mark.parametrize("make", [naive_manager, real_manager])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[s["name"] for s in SCENARIOS])
def test_scenario(scenario, make):
    runner = Runner(scenario["config"], make)
    for number, step in enumerate(scenario["steps"]):
        try:
            runner.step(step)
        except AssertionError as error:
            error.add_note(f"in step {number}: {step}")
            raise
