"""Assembles an engine: ranks, model, cache, connector, in this order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.config import KvCacheConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.connector.io.identity import stored_as
from kvconnect.connector.runtime.manager import KvCacheConnectorManager
from kvconnect.engine.attachment import Attachment, NoConnector, connector_args
from kvconnect.engine.checkpoint.loading import LoadedModel, load_model
from kvconnect.engine.engine import Engine
from kvconnect.engine.explainer import Explainer
from kvconnect.engine.model.model import Model, check_sharing
from kvconnect.engine.model.pool_groups import CacheGeometry
from kvconnect.engine.model.state_memory import StateMemory
from kvconnect.engine.options import EngineOptions
from kvconnect.engine.ranks.leader import Leader, start_followers
from kvconnect.engine.ranks.settings import RankSettings, rank_device
from kvconnect.engine.request.intake import Intake
from kvconnect.engine.scheduler import Scheduler
from kvconnect.engine.snapshots import StateSnapshots
from kvconnect.engine.thread import Inbox
from kvconnect.errors import ConfigurationError
from kvconnect.keys import Shard

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """The parts of an engine that `LLM` needs.

    Attributes:
        loaded: the model, its tokenizer and digest.
        geometry: the layout of its layers in the cache.
        kv: the cache manager.
        scheduler: the scheduler over `kv`.
        intake: makes requests.
        engine: runs the steps; no thread owns it yet.
        inbox: the inbox of the engine's thread; rung when a transfer ended.
    """

    loaded: LoadedModel
    geometry: CacheGeometry
    kv: BaseKVCacheManager
    scheduler: Scheduler
    intake: Intake
    engine: Engine
    inbox: Inbox[Any]


def assembled(options: EngineOptions) -> Assembly:
    """Makes the engine that `options` describe; blocks until the model is loaded.

    Raises:
        ConfigurationError: the model cannot be loaded or served, the store cannot be opened.
        ModelChanged: a file of the model changed while it was loaded.
        RankLost: the process of a rank ended meanwhile; names it. After each of these errors,
            nothing is left running.
    """
    leader = _leader(options)
    try:
        return _assembled(options, leader)
    except BaseException:
        if leader is not None:
            leader.close(failed=True)
        raise


def _assembled(options: EngineOptions, leader: Leader | None) -> Assembly:
    loaded = load_model(
        options.directory,
        dtype=options.dtype,
        device=rank_device(options.device, 0, options.tensor_parallel_size),
        revision=options.model_revision,
        ranks=None if leader is None else leader.group,
    )
    if loaded.model.states:
        options = _with_states(options)
    model, config, manager = loaded.model, options.cache_config, options.cache_factory
    _check_dtype(config, model)
    window_pools = getattr(manager, "supports_window_pools", False)
    keeps_states = getattr(manager, "supports_states", False)
    geometry = CacheGeometry.of(model, config, window_pools=window_pools, states=keeps_states)
    if leader is not None:
        config, manager = leader.meet(loaded), leader.cache_factory
    kv = manager(config, geometry.layouts, model.device)
    layers = geometry.cached_layers(kv.get_buffers, kv.get_max_resource_count(), model.dtype)
    scheduler = Scheduler(
        kv,
        max_num_tokens=options.max_num_tokens,
        max_batch_size=options.max_batch_size,
        policy=options.scheduling,
        speculation=options.speculation,
        share_prefixes=options.knows_chunks and not model.states,
        divide_prompts=options.enable_chunked_prefill,
        stepped=model.stepped,
    )
    digest = stored_as(geometry.digest(loaded.digest), options.connector_config)
    intake = Intake(
        model,
        loaded.tokenizer,
        geometry.whole_layouts,
        digest,
        kv.get_max_resource_count(),
        could_hold=kv.could_hold,
        max_logprobs=options.max_logprobs,
        max_prompt=None if options.enable_chunked_prefill else options.max_num_tokens,
    )
    inbox: Inbox[Any] = Inbox()
    args = None
    if options.connector_config is not None:
        args = connector_args(
            options.directory,
            config,
            options.connector_config,
            geometry,
            model_digest=loaded.digest,
            place=Shard(0, options.tensor_parallel_size),
        )
    attachment = _attached(args, kv, inbox.ring, leader, options.max_batch_size)
    explainer = Explainer(kv, options.connector_config, reuses=config.enable_block_reuse)
    running = kv.get_states if kv.supports_states else None
    memory = StateMemory.of(model, options.max_batch_size, running)
    log = None if leader is None else leader.log_restore
    states = None if memory is None else StateSnapshots(memory, kv, log)
    engine = Engine(
        model, kv, attachment, scheduler, layers, leader, states=states, explainer=explainer
    )
    return Assembly(loaded, geometry, kv, scheduler, intake=intake, engine=engine, inbox=inbox)


def _with_states(options: EngineOptions) -> EngineOptions:
    """Returns `options` for a model with recurrent layers."""
    if getattr(options.cache_factory, "supports_states", False):
        return options
    _log.warning("The cache manager keeps no recurrent states: no prefix is reused")
    if options.connector_config is not None:
        _log.warning("No recurrent states are kept: the connector is not attached")
    config = options.cache_config.model_copy(update={"enable_block_reuse": False})
    return replace(options, kv_cache=config, connector=None)


def _leader(options: EngineOptions) -> Leader | None:
    """Starts the other ranks; ``None``: there are none. See `start_followers`."""
    size = options.tensor_parallel_size
    if size == 1:
        return None
    kind = rank_device(options.device, 0, size).partition(":")[0]
    settings = RankSettings(
        size,
        options.directory,
        options.dtype,
        kind,
        options.model_revision,
        options.cache_config,
        options.connector_config,
    )
    check_sharing(options.directory, size)
    return start_followers(settings)


def _attached(
    args: LlmArgs | None,
    kv: BaseKVCacheManager,
    wakeup: Callable[[], None],
    leader: Leader | None,
    max_batch_size: int,
) -> Attachment:
    """Attaches the connector of `args`, on every rank."""
    ranks = None
    if leader is not None:
        leader.set_up(kv, max_batch_size)
        ranks = leader.group.communicator
    connector: Attachment = (
        NoConnector(ranks)
        if args is None
        else KvCacheConnectorManager(args, kv, wakeup=wakeup, communicator=ranks)
    )
    if leader is not None:
        try:
            leader.wait_until_attached()
        except BaseException:
            connector.shutdown()
            raise
        leader.on_lost(wakeup)
    return connector


def _check_dtype(config: KvCacheConfig, model: Model) -> None:
    if config.dtype not in {"auto", "fp8", str(model.dtype).removeprefix("torch.")}:
        raise ConfigurationError(
            f"kv_cache.dtype: '{config.dtype}' differs from the model's {model.dtype}; "
            "use auto, or fp8"
        )
