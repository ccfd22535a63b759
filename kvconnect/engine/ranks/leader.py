"""The leader's side of several ranks: starts, drives and ends the followers."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.cache.memory.sizing import free_nbytes
from kvconnect.cache.resource_manager import BaseKVCacheManager, KVCacheManagerFactory
from kvconnect.config import KvCacheConfig
from kvconnect.engine.checkpoint.loading import LoadedModel
from kvconnect.engine.model.sequence_step import SequenceStep
from kvconnect.engine.model.state_memory import StateRestore, StateWork
from kvconnect.engine.ranks.copies import LoggedCopier
from kvconnect.engine.ranks.follower import follow
from kvconnect.engine.ranks.group import CONNECT_S, RankGroup
from kvconnect.engine.ranks.launch import FollowerProcesses
from kvconnect.engine.ranks.meeting import Loaded, Meeting, rank_error, torchrun_rank
from kvconnect.engine.ranks.messages import (
    BlockCopy,
    Close,
    LifeSign,
    PlanWriter,
    Setup,
    StepWork,
)
from kvconnect.engine.ranks.settings import RankSettings, limited
from kvconnect.errors import ConfigurationError, KvConnectError, ModelChanged, RankDivergence

_LIFE_SIGN_S = 1.0
_END_S = 1.5
"""The seconds for a process to end, beyond its drain."""

_number = itertools.count()


class NoFollowers:
    """The substitute of `Leader` in an engine of one rank."""

    longest_wait_s = None
    process_ids = ()

    def work(self, plan: Sequence[SequenceStep], states: StateWork | None = None) -> object:
        """Returns None."""
        return None

    def wait(self) -> None:
        """Does nothing."""

    def close(self, *, failed: bool) -> None:
        """Does nothing."""

    def end(self, wait_s: float | None) -> None:
        """Does nothing."""


class Leader:
    """The leader's view of the other ranks, which run in processes of their own.

    Args:
        settings: the settings of all ranks.
        meeting: the leader's meeting.
        processes: the followers' processes, if the leader started them.

    Attributes:
        group: the group of the ranks, which the model is divided among; connected by `meet`.
        process_ids: the process ids of the followers, by rank; set by `meet`.
        longest_wait_s: the most seconds between two calls of `wait` by an engine without work.
    """

    longest_wait_s = _LIFE_SIGN_S

    def __init__(
        self, settings: RankSettings, meeting: Meeting, processes: FollowerProcesses | None
    ) -> None:
        self._settings = settings
        self._meeting = meeting
        self._processes = processes
        self._copies: list[BlockCopy | StateRestore] = []
        self._plans = PlanWriter()
        self.process_ids: tuple[int, ...] = ()
        self.group = RankGroup(0, settings.size, load_timeout_s=settings.load_timeout_s)

    # ------------------------------------------------------------------ start

    def meet(self, loaded: LoadedModel) -> KvCacheConfig:
        """Waits until the others have loaded the model, and connects.

        Returns:
            The cache's configuration, limited to the memory that every rank has.

        Raises:
            KvConnectError: the error of another rank.
            ModelChanged: another rank loaded other files.
            RankDivergence: another rank divides other recurrent layers.
            RankLost: a rank did not connect; names it.
        """
        config, device = self._settings.kv_cache, loaded.model.device
        digest = loaded.digest.hex()
        self._meeting.say_loaded(Loaded(digest, free_nbytes(config, device), loaded.divided))
        said = self._meeting.wait_for_all(self._check)
        for rank, one in enumerate(said):
            if one.digest != digest:
                raise ModelChanged(
                    f"model: rank {rank} loaded other files of {self._settings.directory} than the "
                    "leader: they changed meanwhile; try again"
                )
            if one.divided != said[0].divided:
                raise RankDivergence(
                    f"rank {rank} divides other recurrent layers than the leader: one of them had "
                    "perhaps too little memory while it loaded the model; try again"
                )
        self.process_ids = tuple(one.pid for one in said[1:])
        self._meeting.go_on()
        self._connect(device)
        return limited(config, min(one.free_nbytes for one in said))

    def _connect(self, device: torch.device) -> None:
        self._meeting.wait_until_all_connect(self._check, CONNECT_S)
        began = time.monotonic()
        try:
            self.group.connect(self._meeting.store, device)
        except RuntimeError as error:
            self._check()
            raise self._meeting.lost_rank(time.monotonic() - began) from error

    @property
    def cache_factory(self) -> KVCacheManagerFactory:
        """Returns a factory of the leader's cache manager, whose copies all ranks make."""
        return partial(KVCacheManager, make_copier=partial(LoggedCopier, self._copies))

    def set_up(self, kv: BaseKVCacheManager, max_batch_size: int) -> None:
        """Sends the sizes of the cache to the others, which then attach their connectors.

        Args:
            kv: the leader's cache.
            max_batch_size: the most sequences that run at once.
        """
        assert isinstance(kv, KVCacheManager)  # noqa: S101  of `cache_factory`
        self.group.communicator.broadcast(Setup(kv.sizes, max_batch_size))

    def wait_until_attached(self) -> None:
        """Blocks until the others' connectors are attached; the leader's is.

        Raises:
            KvConnectError: the error of another rank.
        """
        for rank, error in enumerate(self.group.communicator.allgather(None)):
            if error is not None:
                raise rank_error(rank, error)

    def on_lost(self, do: Callable[[], None]) -> None:
        """Registers `do`, called on another thread when a follower's process ends."""
        if self._processes is not None:
            self._processes.on_lost(do)

    # ------------------------------------------------------------------ steps

    def log_restore(self, restore: StateRestore) -> None:
        """Makes the others copy a snapshot of states, in order with the copies of the cache."""
        self._copies.append(restore)

    def work(self, plan: Sequence[SequenceStep], states: StateWork | None = None) -> StepWork:
        """Returns the others' work in a step; the connector sends it when the step begins.

        Call it once for each step.

        Args:
            plan: the computation; empty in an idle step.
            states: the work on recurrent states; ``None``: there is none.

        Raises:
            RankLost: a rank is lost; names it.
        """
        self._check()
        copies = tuple(self._copies)
        self._copies.clear()
        return StepWork(copies, self._plans.message(plan), states)

    def wait(self) -> None:
        """Sends the others a sign of life without work.

        Raises:
            RankLost: a rank is lost; names it.
        """
        self._check()
        self.group.communicator.broadcast(LifeSign())

    # ------------------------------------------------------------------ end

    def close(self, *, failed: bool) -> None:
        """Ends the others, which drain what they have staged unless the engine `failed`.

        Does not block.
        """
        if failed:
            self._meeting.call_off("the leader ended")
            if self._processes is not None:
                self._processes.end(0.0)
            self._leave()
        else:
            with contextlib.suppress(KvConnectError):  # a rank is lost, so the others end
                self.group.communicator.broadcast(Close())

    def end(self, wait_s: float | None) -> None:
        """Waits for the others for so long (``None``: while they may drain), and kills the rest.

        Idempotent; on any thread.
        """
        if self._processes is not None:
            connector = self._settings.connector
            drain_s = 0.0 if connector is None else connector.save_timeout_s
            self._processes.end(drain_s + _END_S if wait_s is None else wait_s)
        self._leave()

    def _leave(self) -> None:
        """Releases descriptors and ports, also while an error keeps this object."""
        self.group.close()
        self._meeting.close()

    def _check(self) -> None:
        if self._processes is not None:
            self._processes.check()


def start_followers(settings: RankSettings) -> Leader:
    """Starts the other ranks of an engine.

    Under ``torchrun`` they are started already, and this process may be a follower. It then follows
    until the leader closes its engine, and ends its process, so that a script continues only in the
    leader's.

    Raises:
        ConfigurationError: torchrun started another number of processes; this process has an engine
            of several ranks already, or a default group of torch.distributed that new processes are
            not in. Nothing was started.
        SystemExit: this process was a follower, and the engine was closed.
    """
    rank = torchrun_rank(settings.size)
    if rank is None:
        if dist.is_initialized():
            raise ConfigurationError(
                f"tensor_parallel_size={settings.size}: torch.distributed is initialized in this "
                "process, by an engine of several ranks or by its own code; a process has one such "
                "engine at a time: close it, or run under torchrun"
            )
        meeting = Meeting.opened(settings.size)
        return Leader(settings, meeting, FollowerProcesses(settings, meeting.port))
    meeting = Meeting.under_torchrun(next(_number))
    if rank == 0:
        return Leader(settings, meeting, None)
    follow(settings, meeting, rank)
    raise SystemExit(0)
