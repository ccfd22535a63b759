"""A rank's half of a connector, which makes the transfers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from kvconnect.connector.data import KvCachePool, LlmArgs, TransferFailure
from kvconnect.connector.pool_view import pool_view
from kvconnect.connector.stream import ForwardStream
from kvconnect.errors import ConfigurationError


class KvCacheConnectorWorker(ABC):
    """Moves KV blocks of one rank. Called on the engine's thread.

    `stream` is the CUDA stream of the forward pass, on the CPU a `CpuStream` with the same methods;
    never ``None``. Methods marked *ours* have defaults.
    """

    def __init__(self, llm_args: LlmArgs) -> None:
        self._llm_args = llm_args
        self._metadata: object = None

    def bind_connector_meta(self, metadata: object) -> None:
        """Receives the leader's instructions for this step, and sets ``self._metadata`` to them."""
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        """Returns the bound instructions; ``None`` between steps."""
        return self._metadata

    def clear_connector_meta(self) -> None:
        """Ends the step (*ours*)."""
        self._metadata = None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        """Receives the pool, ``[num_blocks, num_layers, kv_factor, elements]``; called once, first.

        If the pool is in host memory, ``.cpu()`` of a part of it is a copy, too.
        """

    def register_kv_cache_layout(self, pools: Sequence[KvCachePool]) -> None:
        """Receives the pools, one for each pool group, in their order (*ours*).

        Called instead of `register_kv_caches`, to which the default forwards a single pool. A pool
        of a sliding window counts as several: its blocks come chunk by chunk and are freed when the
        window has passed, which a flat list of a request's block ids cannot express.

        Raises:
            ConfigurationError: several pools, and the class does not override this.
        """
        windows = [pool.layout.window for pool in pools]
        if windows != [None]:
            named = ", ".join(
                "full attention" if one is None else f"window {one}" for one in windows
            )
            raise ConfigurationError(
                f"{type(self).__name__}: the model has {len(pools)} KV pools ({named}); override "
                "register_kv_cache_layout, and use new_block_ids_by_group, to serve them"
            )
        self.register_kv_caches(pool_view(pools[0].tensor))

    @abstractmethod
    def start_load_kv(self, stream: ForwardStream) -> None:
        """Begins the loads of this step; once a step, after binding, before the forward pass."""

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: ForwardStream) -> None:
        """Makes the loaded part of layer `layer_idx` readable on `stream`.

        Called in ascending order.
        """

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: ForwardStream) -> None:
        """Saves a layer whose KV is written or enqueued on `stream`; orders copies behind that."""

    @abstractmethod
    def wait_for_save(self, stream: ForwardStream) -> None:
        """Waits for the saves of a forward pass, or makes `stream` wait for them.

        When it returns, every byte read from the blocks has left them, or `stream` waits for that.
        Only blocks of a request that `request_finished` answered with True may be read later.
        """

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Returns the requests whose background saves and loads have ended since the last call.

        Called once a step, idle steps too. The save of `finished_gen_req_ids` has begun
        (`request_finished` returned True), and the load of `started_loading_req_ids`. Each id is
        passed once, and is returned once, in this call or later.

        With one rank this is the last call of a step, as in TensorRT-LLM: a request's id is passed
        in the step in which the request ends. With several ranks it is called before tokens are
        sampled, and the id is passed in the next step, which follows at once.
        """

    def register_forward_pass_callable(self) -> Callable[[], None] | None:
        """Returns a function to call at the end of each forward pass, on its stream (*ours*)."""
        return None

    def get_failed(self) -> list[TransferFailure]:
        """Returns the transfers that failed (*ours*).

        Called after each forward pass, before its tokens are sampled: failures of synchronous loads
        must be returned there. Called again after `get_finished`.
        """
        return []

    def get_load_progress(self) -> Mapping[int, int]:
        """Returns the progress of loads that overlap with computing (*ours*).

        Called after each `get_failed`, after forward passes only if a load runs; must not block.
        Maps a request's id to a position: every token from there to the end of the load is in the
        blocks. A position never grows. The last position is returned no later than the id in
        `get_finished` or `get_failed`.
        """
        return {}

    def get_load_heads(self) -> Mapping[int, int]:
        """Returns the leading tokens of loads that follow another engine (*ours*).

        Called after each `get_load_progress`; must not block. Maps a request's id to a position:
        the blocks from the load's start to there have been filled, except those that the request
        has computed. 0: there are none.
        """
        return {}

    def get_load_times(self) -> Mapping[int, Sequence[tuple[int, float]]]:
        """Returns the times of the progress of loads since the last call (*ours*).

        The result has, by request id, pairs of a position and the seconds since the load's start,
        in order. The engine predicts loads from them. With the default, loads that progress during
        a forward pass seem slower than they are.
        """
        return {}

    def build_worker_meta(self) -> object | None:
        """Returns this rank's data for the scheduler's `update_from_workers`; picklable (*ours*).

        Called once a step, after `get_failed`; must not block. ``None``: there is no data.
        """
        return None

    def request_reset(self, request_id: int, num_committed: int) -> None:
        """Ends all use of the blocks of a request, which are freed when this returns (*ours*).

        The request was preempted or sent back. Called between two forward passes. As after
        `wait_for_save`, every byte that is read from the blocks has left them then, or the stream
        of the forward passes waits for that.

        Args:
            request_id: the id of the request, which may be admitted again with other blocks.
            num_committed: the request's leading valid tokens. In the pool of a sliding window it
                holds only the blocks that this position needs.
        """

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Receives `wakeup`, which may be called from any thread when a transfer ends (*ours*).

        A class that calls it sets ``wakes = True``; others are polled.
        """

    wakes: bool = False

    def cancel(self, request_id: int) -> None:
        """Cancels a load whose request ended; `get_finished` still returns its id (*ours*)."""

    def shutdown(self) -> None:
        """Finishes staged work, and releases everything; idempotent (*ours*)."""
