"""The store, pool and fetched blocks that scheduler and worker of a TensorRT-LLM process share."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvconnect.connector.io.blocking import StoreAccess
from kvconnect.connector.io.orders import BlockLoad, SaveOrder
from kvconnect.connector.stream import ForwardStream, cuda_stream
from kvconnect.engine.at_exit import close_at_exit
from kvconnect.errors import ConfigurationError, UnsupportedModel
from kvconnect.integrations.core.arguments import make_arguments
from kvconnect.integrations.core.load_choice import LoadChoice, PlannedLoad
from kvconnect.integrations.core.metrics_port import tell_metrics
from kvconnect.integrations.core.models import digest_of_model, directory_of
from kvconnect.integrations.core.requests import RequestMaker, extra_key_of
from kvconnect.integrations.trtllm.settings import (
    ENGINE,
    check_engine,
    check_model,
    engine_settings,
    variant_of,
)
from kvconnect.kernels.block_copy import copy_pairs
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.cuda.driver.streams import copy_streams
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.trace import count, warn_once

# After a load that took at least half of its time limit and failed, none is tried for this many
# times its duration: the engine stands still during a load.
_PAUSE = 10
# The most tokens of a step if TensorRT-LLM does not provide them; its default.
_MAX_TOKENS = 8192


class Attachment:
    """A store beside TensorRT-LLM's pool.

    TensorRT-LLM does not accept that a load fails. So promised blocks are fetched and checked
    before the promise. They go into host memory, at most ``staging_bytes``, in addition to the
    staging memory itself. The step's load is a copy from there, which cannot fail.

    Belongs to TensorRT-LLM's executor thread, which waits for each lookup (``lookup_timeout_ms``)
    and each load (``load_timeout_s``, by default 2 s).

    Attributes:
        choice: whether to fetch or to compute.
        dropped: the first block of each request that there was no room to save.
    """

    _made: ClassVar[dict[int, Attachment]] = {}
    _making: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def of(cls, llm_args: Any) -> Attachment:
        """Returns the attachment of these arguments; the first call makes it.

        Raises:
            ConfigurationError: a setting is wrong, or the model cannot be identified.
        """
        with cls._making:
            known = cls._made.get(id(llm_args))
            if known is None:
                known = cls._made[id(llm_args)] = cls(llm_args)
            return known

    def __init__(self, llm_args: Any) -> None:
        self.settings = engine_settings(llm_args)
        revision = self.settings.own.model_revision
        check_engine(llm_args, is_named=revision is not None)
        self.llm_args = llm_args  # keeps its id from being given to another
        self._directory = directory_of(
            str(llm_args.model), revision=getattr(llm_args, "revision", None)
        )
        check_model(llm_args, self._directory, is_named=revision is not None)
        self._digest = digest_of_model(self._directory, revision=revision)
        self._access: StoreAccess | None = None
        self._maker: RequestMaker | None = None
        self._pool: PagedKv | None = None
        self._first_id = 0
        self._attached = ExitStack()
        self._fetched: dict[int, PagedKv] = {}
        self._paused_until = 0.0
        self.dropped: dict[int, int] = {}
        # TensorRT-LLM then starts a step before it takes the results of the one before.
        self._overlaps_steps = not getattr(llm_args, "disable_overlap_scheduler", True)
        self._has_begun_step = False
        self.choice = LoadChoice(
            tokens_per_block=int(llm_args.kv_cache_config.tokens_per_block),
            max_tokens=getattr(llm_args, "max_num_tokens", None) or _MAX_TOKENS,
            num_ahead=int(self._overlaps_steps),
            decides=self.settings.own.load_decisions,
        )

    # ------------------------------------------------------------------ start and end

    def register(self, pool: Tensor) -> None:
        """Registers the pool and opens the store.

        The pool is ``[num_blocks, num_layers, kv_factor, elements]``.

        Raises:
            ConfigurationError: the store cannot be opened.
            UnsupportedModel: the pool is of another form.
        """
        pool = pool.as_subclass(Tensor)
        size = int(self.llm_args.kv_cache_config.tokens_per_block)
        layout = _opaque_layout(pool, size)
        args = make_arguments(self.settings, self._directory, self._digest, [layout])
        with ExitStack() as undo:
            undo.callback(tell_metrics(ENGINE, self.settings.own))
            self._access = StoreAccess(args, pool.device)
            self._attached.push(undo.pop_all())
        self._pool = PagedKv.from_pool(pool, layout)
        copier = self._access.attached[0]
        self._first_id = self._attached.enter_context(copier.attached(self._pool))
        self._layout = layout
        variant = {
            **variant_of(self.llm_args, self._directory),
            "pool": str(tuple(pool.shape[1:])),
        }
        self._maker = RequestMaker(args, extra_key_of(self.settings, variant))
        close_at_exit(self)

    def close(self) -> None:
        """Writes staged blocks, up to ``save_timeout_s``, and closes the store. Idempotent."""
        with self._making:
            self._made.pop(id(self.llm_args), None)
        access, self._access = self._access, None
        if access is not None:
            access.close()
            self._attached.close()
        self._fetched.clear()

    @property
    def maker(self) -> RequestMaker | None:
        """The maker of requests; ``None`` before the pool is known or after `close`."""
        return self._maker if self._access is not None else None

    @property
    def first_id(self) -> int:
        """The offset from TensorRT-LLM's block ids to those in a save."""
        return self._first_id

    # ------------------------------------------------------------------ the scheduler's

    def count_stored(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading blocks of these chained `keys` the store has."""
        return 0 if self._access is None else self._access.lookup(keys)

    def begin_step(self, tokens: int, tokens_times_context: float) -> None:
        """Records the start of a step; see `LoadChoice`."""
        self._has_begun_step = True
        self.choice.begin_step(tokens, tokens_times_context)

    def end_turn(self) -> None:
        """Records that a turn of the executor's loop ends, and with it a step, if one has ended."""
        still_runs = self._overlaps_steps and self._has_begun_step
        self._has_begun_step = False
        if self.choice.num_running > still_runs:
            self.choice.end_step()

    def fetch(self, request_id: int, keys: Sequence[BlockKey], load: PlannedLoad) -> int:
        """Loads blocks into host memory for `request_id`; returns how many leading ones it has.

        Args:
            request_id: the request; what was fetched for it before is freed.
            keys: the keys of the blocks; those that there is no room for are left out.
            load: the choice to load them.
        """
        self.forget(request_id)
        access = self._access
        held = sum(memory.num_blocks for memory in self._fetched.values())
        room = self.settings.connector.staging_bytes // self._layout.block_nbytes - held
        keys = keys[: max(0, room)]
        if access is None or not keys or time.monotonic() < self._paused_until:
            return 0
        started = time.monotonic()
        size = self._layout.tokens_per_block
        load.num_tokens = min(load.num_tokens, len(keys) * size)
        self.choice.start(load)
        memory = self._host_blocks(len(keys))
        with access.attached[0].attached(memory) as first:
            blocks = [BlockLoad(key, first + number) for number, key in enumerate(keys)]
            loaded = access.load_all([blocks])[0]
        self.choice.end(load, loaded * size)
        took = time.monotonic() - started
        if loaded < len(keys) and took >= self.settings.connector.load_timeout_s / 2:
            self._paused_until = time.monotonic() + _PAUSE * took
            warn_once("trtllm.pause", f"loads took {took:.1f} s; none is tried for a while")
        if loaded:
            self._fetched[request_id] = memory
        return loaded

    def forget(self, request_id: int) -> None:
        """Frees the host memory of blocks that were fetched for `request_id`."""
        self._fetched.pop(request_id, None)

    def _host_blocks(self, count: int) -> PagedKv:
        pinned = self._pool is not None and self._pool.device.type == "cuda"
        memory = torch.empty(
            self._layout.flat_shape(count), dtype=self._layout.dtype, pin_memory=pinned
        )
        return PagedKv.from_pool(memory, self._layout)

    # ------------------------------------------------------------------ the worker's

    def copy_in(self, request_id: int, block_ids: Sequence[int], stream: Any) -> None:
        """Copies fetched blocks into the pool; `stream` waits for the copies.

        Args:
            request_id: the request of the blocks.
            block_ids: the destinations of the leading fetched blocks; -1: the block is not needed.
            stream: the stream of the forward pass.
        """
        memory, pool = self._fetched.get(request_id), self._pool
        if memory is None or pool is None:
            raise ConfigurationError(
                f"request {request_id}: nothing was fetched for it in this process; scheduler and "
                "worker of rank 0 must be in one"
            )
        forward = _forward_stream(stream)
        own = None if forward is None else copy_streams(pool.device).load
        if own is not None and forward is not None:
            own.wait_stream(forward)
        needed = [number for number, block_id in enumerate(block_ids) if block_id >= 0]
        moved = copy_pairs(memory, pool, needed, [block_ids[n] for n in needed], stream=own)
        if forward is not None:
            moved.wait_on(forward)
        count("engine.loaded", blocks=len(needed))
        self.forget(request_id)

    def save(self, order: SaveOrder, stream: Any) -> None:
        """Stages blocks after the work of `stream`. A block without room is noted in `dropped`."""
        if self._access is None:
            return
        forward = _forward_stream(stream)
        with torch.cuda.stream(forward) if forward is not None else ExitStack():
            staged = self._access.save(order.blocks, namespace=order.namespace)
        if staged < len(order.blocks):
            self.dropped[order.request_id] = order.blocks[staged].number


def _forward_stream(stream: ForwardStream | None) -> torch.cuda.Stream | None:
    return cuda_stream(stream) if isinstance(stream, torch.cuda.Stream) else None


def _opaque_layout(pool: Tensor, tokens_per_block: int) -> KvCacheLayout:
    """Returns a layout of blocks with TensorRT-LLM's own inner order, which move as a whole."""
    if pool.ndim != 4 or pool.shape[2] not in {1, 2} or pool.shape[3] % tokens_per_block:
        raise UnsupportedModel(
            f"KV pool of shape {tuple(pool.shape)}: [num_blocks, num_layers, 1 or 2, elements] is "
            f"needed, elements a multiple of tokens_per_block={tokens_per_block}"
        )
    dim = pool.shape[3] // tokens_per_block
    value_dim = dim if pool.shape[2] == 2 else 0
    return KvCacheLayout(pool.shape[1], 1, dim, value_dim, tokens_per_block, pool.dtype)
