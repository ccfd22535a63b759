"""A follower between the leader's messages, without processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import recording
import torch

from kvconnect import KvCacheConfig
from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.cache.memory.copier import TensorCopier
from kvconnect.connector.ranks.communicator import CancelLoad, Instructions, Report, ResetRequest
from kvconnect.engine.checkpoint.loading import load_model
from kvconnect.engine.model.pool_groups import CacheGeometry
from kvconnect.engine.ranks.follower import Follower
from kvconnect.engine.ranks.messages import BlockCopy, Close, LifeSign, Setup, StepWork
from kvconnect.engine.ranks.settings import RankSettings
from kvconnect.errors import RankDivergence, UsageError

WORK = StepWork((BlockCopy("move", 0, (1,), (2,)),), ())


class Group:
    """The second of two ranks; the leader sends `messages`, and hears what is in `gathered`."""

    rank, size = 1, 2

    def __init__(self, messages: Sequence[object]) -> None:
        self.communicator = self
        self.gathered: list[Any] = []
        self.failed: list[BaseException] = []
        self._messages = iter(messages)

    def broadcast(self, _: object, *, idle: bool) -> Any:
        assert idle  # the leader may take any time
        return next(self._messages)

    def allgather(self, value: Any) -> list[Any]:
        self.gathered.append(value)
        return [value, value]

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)


@pytest.fixture(scope="module")
def loaded(model_of):
    return load_model(model_of("llama"), dtype="float32", device="cpu")


@pytest.fixture
def follow(model_of, loaded, monkeypatch):
    """Has a follower with a recording connector take messages; what was called, in order."""
    script = recording.fresh_script()
    cache = KvCacheConfig(tokens_per_block=8, max_tokens=64)
    layouts = CacheGeometry.of(loaded.model, cache, window_pools=True).layouts
    setup = Setup(KVCacheManager(cache, layouts, torch.device("cpu")).sizes, 4)
    monkeypatch.setattr(TensorCopier, "move", lambda _, *args: script.note("copied", *args))
    for name in ("request_reset", "cancel"):
        monkeypatch.setattr(
            recording.RecordingWorker, name, lambda _, *args, name=name: script.note(name, *args)
        )

    def run(*messages: object, connects: bool = True) -> tuple[Group, list[Any]]:
        group = Group([setup, *messages, Close()])
        connector = recording.config() if connects else None
        settings = RankSettings(2, model_of("llama"), "float32", "cpu", None, cache, connector)
        Follower(settings, loaded, group).run()
        return group, script.calls

    return run


def test_before_blocks_are_copied_or_loaded_a_worker_has_read_those_that_go(follow):
    orders = (ResetRequest(7, 3), CancelLoad(8, frozenset([0])), CancelLoad(9, frozenset([1])))
    step = Instructions(1, "meta", saving=(7,), loading=(5,), orders=orders, work=WORK)
    group, calls = follow(step, LifeSign())
    assert calls[1:] == [  # behind register_kv_caches
        ("request_reset", 7, 3),
        ("cancel", 9),
        ("copied", 0, (1,), (2,)),
        ("bind_connector_meta", "meta"),
        ("start_load_kv", "meta"),
        ("get_finished", [7], [5]),
        ("worker.shutdown",),
    ]
    assert group.gathered == [None, Report(1, saved=(7,), loaded=(5,))]


@pytest.mark.parametrize(("meta", "bound"), [("meta", 1), (None, 0)])
def test_an_idle_step_binds_what_there_is_and_starts_nothing(meta, bound, follow):
    _, calls = follow(Instructions(1, meta, is_idle=True, work=WORK))
    names = [call[0] for call in calls]
    assert names.count("bind_connector_meta") == bound
    assert "start_load_kv" not in names
    assert names.count("copied") == names.count("get_finished") == 1


def test_without_a_connector_a_follower_does_the_work_alone(follow):
    group, calls = follow(WORK, connects=False)
    assert [call[0] for call in calls] == ["copied"]
    assert group.gathered == [None]


def test_a_step_of_another_number_is_refused(follow):
    with pytest.raises(RankDivergence, match="rank 1 is in step 1, the leader in step 2"):
        follow(Instructions(2, work=WORK))


def test_what_the_leader_does_not_send_amid_steps_is_refused(follow):
    with pytest.raises(UsageError, match="the leader sent Setup amid its steps"):
        follow(Setup(None, 4))
