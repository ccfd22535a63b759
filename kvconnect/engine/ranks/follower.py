"""A follower: computes its part of every step that the leader tells it of."""

from __future__ import annotations

import numpy as np
import torch

from kvconnect.connector.data import LlmArgs
from kvconnect.connector.offload.store import stored_as
from kvconnect.connector.runtime.manager import KvCacheConnectorManager
from kvconnect.engine.attachment import Attachment, NoConnector
from kvconnect.engine.checkpoint.loading import LoadedModel, load_model
from kvconnect.engine.model.forward_step import ForwardStep
from kvconnect.engine.model.pool_groups import CacheGeometry
from kvconnect.engine.ranks.follower_cache import FollowerCache
from kvconnect.engine.ranks.group import RankGroup
from kvconnect.engine.ranks.meeting import Loaded, Meeting
from kvconnect.engine.ranks.memory import free_nbytes
from kvconnect.engine.ranks.messages import (
    Close,
    EventKind,
    LifeSign,
    Message,
    PlanReader,
    RequestEvent,
    Setup,
    StepMessage,
)
from kvconnect.engine.ranks.settings import RankSettings, rank_device
from kvconnect.errors import UsageError
from kvconnect.keys import BlockKey, Shard
from kvconnect.request import LlmRequest, ScheduledBatch

__all__ = ["follow"]


def follow(settings: RankSettings, meeting: Meeting, rank: int) -> None:
    """Be a follower until the leader closes its engine; blocks until then.

    Raises:
        RankLost: a rank is lost; names it.
        BaseException: whatever went wrong on this rank; the other ranks are told.
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
    except BaseException as error:  # also one that asks this process to end
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
    meeting.say_loaded(Loaded(loaded.digest.hex(), free))
    meeting.wait_to_go_on()
    return loaded


class Follower:
    """The part of an engine that every rank but the leader has.

    Args:
        settings: of all ranks.
        loaded: this rank's part of the model.
        group: connected.
    """

    def __init__(self, settings: RankSettings, loaded: LoadedModel, group: RankGroup) -> None:
        self._settings = settings
        self._model = loaded.model
        self._group = group
        self._plans = PlanReader()
        self._requests: dict[int, LlmRequest] = {}
        self._geometry = CacheGeometry.of(loaded.model, settings.kv_cache, window_pools=True)
        self._digest = loaded.digest
        self._connector: Attachment = NoConnector()

    def run(self) -> None:
        """Take part until the leader says `Close`; then drain what is staged."""
        self._set_up()
        while not isinstance(message := self._receive(), Close):
            match message:
                case StepMessage():
                    self._step(message)
                case LifeSign():
                    pass
                case Setup():
                    raise UsageError("the leader set its ranks up twice")
        self._connector.shutdown()

    def _receive(self) -> Message:
        message: Message = self._group.wait_for_leader(LifeSign())
        return message

    def _set_up(self) -> None:
        setup = self._receive()
        if not isinstance(setup, Setup):
            raise UsageError(f"the leader began with {type(setup).__name__}, not with Setup")
        error: BaseException | None = None
        try:
            self._attach(setup)
        except BaseException as caught:  # noqa: BLE001  the leader raises it
            error = caught
        self._group.allgather(None if error is None else (type(error).__name__, str(error)))
        if error is not None:
            raise error

    def _attach(self, setup: Setup) -> None:
        geometry, settings = self._geometry, self._settings
        self._kv = FollowerCache(setup.sizes, geometry.layouts, self._model.device)
        self._layers = geometry.cached_layers(self._kv, self._model.dtype)
        if settings.connector is None:
            return
        args = LlmArgs(
            str(settings.directory),
            settings.kv_cache,
            settings.connector,
            layouts=geometry.layouts,
            model_digest=stored_as(geometry.digest(self._digest), settings.connector),
            place=Shard(self._group.rank, self._group.size),
            num_kv_heads=geometry.num_kv_heads,
        )
        self._connector = KvCacheConnectorManager(
            args, self._kv, wakeup=_nothing, communicator=self._group
        )

    def _step(self, message: StepMessage) -> None:
        for event in message.events:
            self._note(event)
        self._kv.make_copies(message.copies)
        plan = self._plans.plan(message.sequences)
        if not message.is_idle:
            self._connector.begin_step(ScheduledBatch())
        if plan:
            step = ForwardStep(plan, self._layers, self._connector, device=self._model.device)
            self._model.forward(step)
            self._connector.end_forward()
        self._connector.end_step()

    def _note(self, event: RequestEvent) -> None:
        connector = self._connector
        if event.kind is EventKind.ARRIVED:
            self._requests[event.request_id] = request = _request(event.request_id)
            connector.on_new_request(request)
            return
        request = self._requests[event.request_id]
        request.num_computed_tokens = event.num_computed_tokens
        match event.kind:
            case EventKind.ADMITTED:
                if isinstance(connector, KvCacheConnectorManager):
                    connector.blocks_allocated(request, [])
            case EventKind.RESET:
                connector.request_reset(request)
            case EventKind.FINISHED | EventKind.ABORTED:
                connector.request_finished(request, aborted=event.kind is EventKind.ABORTED)
                del self._requests[event.request_id]


def _request(request_id: int) -> LlmRequest:
    """Stands for the leader's request: its tokens are told step by step, and not kept."""
    return LlmRequest(
        request_id, np.zeros(1, np.int32), chain_root=BlockKey(bytes(32)), tokens_per_block=2
    )


def _nothing() -> None:
    """The leader asks in time."""
