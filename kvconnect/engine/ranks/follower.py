"""A follower: computes its part of every step that the leader sends."""

from __future__ import annotations

import torch

from kvconnect.cache.memory.copier import TensorCopier
from kvconnect.cache.memory.pool_tensor import CacheMemory
from kvconnect.cache.memory.sizing import free_nbytes
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.ranks.communicator import Instructions
from kvconnect.connector.runtime.loading import build_worker, connector_classes
from kvconnect.connector.runtime.pools import checked_pools
from kvconnect.connector.runtime.rank import RankDriver
from kvconnect.connector.worker import KvCacheConnectorWorker
from kvconnect.engine.attachment import NoConnector, connector_args
from kvconnect.engine.checkpoint.loading import LoadedModel, load_model
from kvconnect.engine.model.forward_step import ForwardStep, LayerHooks
from kvconnect.engine.model.pool_groups import CacheGeometry
from kvconnect.engine.model.state_memory import StateMemory
from kvconnect.engine.ranks.copies import make_copies
from kvconnect.engine.ranks.group import RankGroup
from kvconnect.engine.ranks.meeting import Loaded, Meeting
from kvconnect.engine.ranks.messages import (
    Close,
    LifeSign,
    Message,
    PlanReader,
    Setup,
    StepWork,
)
from kvconnect.engine.ranks.settings import RankSettings, rank_device
from kvconnect.errors import UsageError
from kvconnect.keys import Shard


def follow(settings: RankSettings, meeting: Meeting, rank: int) -> None:
    """Follows until the leader closes its engine; blocks until then.

    Raises:
        RankLost: a rank is lost; names it.
        BaseException: any error of this rank; the other ranks are notified of it.
    """
    group = RankGroup(rank, settings.size, load_timeout_s=settings.load_timeout_s)
    try:
        loaded = _load(settings, meeting, group)
        if loaded.model.device.type == "cuda":
            torch.cuda.set_device(loaded.model.device)
        meeting.say_connecting()
        group.connect(meeting.store, loaded.model.device)
        meeting.say_connected()
        Follower(settings, loaded, group).run()
    except BaseException as error:  # also an error that ends this process
        group.fail(error)
        raise
    finally:
        group.close()


def _load(settings: RankSettings, meeting: Meeting, group: RankGroup) -> LoadedModel:
    try:
        with meeting.loading():
            loaded = load_model(
                settings.directory,
                dtype=settings.dtype,
                device=rank_device(settings.device, group.rank, settings.size),
                revision=settings.revision,
                ranks=group,
            )
    except BaseException as error:
        meeting.say_loaded(Loaded(error=(type(error).__name__, str(error))))
        raise
    free = free_nbytes(settings.kv_cache, loaded.model.device)
    meeting.say_loaded(Loaded(loaded.digest.hex(), free, loaded.divided))
    meeting.wait_to_go_on()
    return loaded


class Follower:
    """The part of an engine that every rank but the leader has; holds no request.

    Args:
        settings: the settings of all ranks.
        loaded: this rank's part of the model.
        group: the connected group.
    """

    def __init__(self, settings: RankSettings, loaded: LoadedModel, group: RankGroup) -> None:
        self._settings = settings
        self._model = loaded.model
        self._group = group
        self._plans = PlanReader()
        self._geometry = CacheGeometry.of(
            loaded.model, settings.kv_cache, window_pools=True, states=True
        )
        self._digest = loaded.digest
        self._worker: KvCacheConnectorWorker | None = None

    def run(self) -> None:
        """Follows the leader's steps until its message `Close`; then drains staged blocks."""
        self._set_up()
        while not isinstance(message := self._receive(), Close):
            match message:
                case Instructions(work=StepWork() as work):
                    self._driver.accept(message)
                    self._make_copies(work)
                    self._driver.start()
                    if self._forward(work, self._driver):
                        self._driver.end_forward()
                    self._driver.end()
                case StepWork():
                    self._make_copies(message)
                    self._forward(message, NoConnector())
                case LifeSign():
                    pass
                case _:
                    raise UsageError(f"the leader sent {type(message).__name__} amid its steps")
        self._shut_down()

    def _receive(self) -> Message:
        message: Message = LifeSign()  # the leader's number; it may take any time while it lives
        return self._group.communicator.broadcast(message, idle=True)

    def _set_up(self) -> None:
        setup = self._receive()
        if not isinstance(setup, Setup):
            raise UsageError(f"the leader began with {type(setup).__name__}, not with Setup")
        error: BaseException | None = None
        try:
            self._allocate(setup)
            if self._settings.connector is not None:
                self._attach(self._settings.connector)
        except BaseException as caught:  # noqa: BLE001  the leader raises it
            error = caught
        self._group.communicator.allgather(
            None if error is None else (type(error).__name__, str(error))
        )
        if error is not None:
            self._shut_down()
            raise error

    def _allocate(self, setup: Setup) -> None:
        layouts, sizes = self._geometry.layouts, setup.sizes
        if sizes.layouts != layouts:
            raise UsageError(f"the leader's pools are {sizes.layouts}, this rank's {layouts}")
        self._memory = memory = CacheMemory(sizes, self._model.device)
        self._copier = TensorCopier(memory.pools, memory.host_pools, layouts)
        self._layers = self._geometry.cached_layers(
            memory.buffers, sizes.num_blocks[0], self._model.dtype
        )
        self._states = StateMemory.of(self._model, setup.max_batch_size, memory.states)

    def _attach(self, connector: KvCacheConnectorConfig) -> None:
        args = connector_args(
            self._settings.directory,
            self._settings.kv_cache,
            connector,
            self._geometry,
            model_digest=self._digest,
            place=Shard(self._group.rank, self._group.size),
        )
        pools = checked_pools(self._memory, args.layouts)
        self._worker = build_worker(args, connector_classes(args)[1])
        ranks = self._group.communicator
        # No wakeup: the leader polls in time.
        self._driver = RankDriver(self._worker, pools, ranks, wakeup=lambda: None)

    def _make_copies(self, work: StepWork) -> None:
        """Makes the copies that the leader's block manager ordered."""
        if self._states is not None and work.states is not None:
            self._states.slots.keep(work.states.running)
        make_copies(self._copier, work.copies, self._states)

    def _forward(self, work: StepWork, hooks: LayerHooks) -> bool:
        """Computes this rank's part of a step; False if there is nothing to compute."""
        plan = self._plans.plan(work.sequences)
        if plan:
            states = self._states
            slots = None if states is None else states.slots
            step = ForwardStep(plan, self._layers, hooks, device=self._model.device, slots=slots)
            self._model.forward(step)
            if states is not None and work.states is not None:
                states.take(work.states.snapshots)
        return bool(plan)

    def _shut_down(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
