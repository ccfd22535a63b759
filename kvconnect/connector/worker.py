"""A rank's half of a connector: the transfers themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from kvconnect.connector.data import KvCachePool, LlmArgs, TransferFailure
from kvconnect.connector.pool_view import pool_view
from kvconnect.connector.stream import ForwardStream
from kvconnect.errors import ConfigurationError

__all__ = ["KvCacheConnectorWorker"]


class KvCacheConnectorWorker(ABC):
    """Moves KV blocks of one rank. Called on the engine's thread.

    `stream` is the CUDA stream of the forward pass, on the CPU a `CpuStream` with the same methods;
    never ``None``. Methods marked *ours* have defaults.
    """

    def __init__(self, llm_args: LlmArgs) -> None:
        self._llm_args = llm_args
        self._metadata: object = None

    def bind_connector_meta(self, metadata: object) -> None:
        """The leader's instructions for this step, also as ``self._metadata``."""
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        """What is bound now; ``None`` between steps."""
        return self._metadata

    def clear_connector_meta(self) -> None:
        """*Ours.* The step is over."""
        self._metadata = None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        """Called once, first: the pool, ``[num_blocks, num_layers, kv_factor, elements]``.

        Also where the pool is in host memory, ``.cpu()`` of a part of it is a copy.
        """

    def register_kv_cache_layout(self, pools: Sequence[KvCachePool]) -> None:
        """*Ours.* Called instead, with one entry per pool group, in their order.

        A single pool is forwarded to `register_kv_caches`. A pool of a sliding window counts as
        several: its blocks come chunk by chunk and go when the window has passed, which is not what
        a flat list of a request's block ids promises.

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
        """Begin the loads of this step; once a step, after binding, before the forward pass."""

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: ForwardStream) -> None:
        """After this, layer `layer_idx` of what was loaded may be read on `stream`. Ascending."""

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: ForwardStream) -> None:
        """The layer's KV is written, or at least enqueued on `stream`: order copies behind it."""

    @abstractmethod
    def wait_for_save(self, stream: ForwardStream) -> None:
        """The end of a forward pass.

        When it returns, every byte read from the blocks has left them, or `stream` waits for that.
        Only blocks of a request that `request_finished` answered with True may be read later.
        """

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Returns the requests whose background saves and loads have ended since the last call.

        Called once a step, idle steps too. `finished_gen_req_ids` began to save (`request_finished`
        was True), `started_loading_req_ids` to load; each id comes in once, and may be returned
        from then on, once.

        On one rank this is the last call of a step, as in TensorRT-LLM: the step in which a request
        ends passes in its id. Several ranks are asked before anything is sampled, and pass it in
        with the next step, which follows at once.
        """

    def register_forward_pass_callable(self) -> Callable[[], None] | None:
        """*Ours.* Something to call at the end of each forward pass, on its stream."""
        return None

    def get_failed(self) -> list[TransferFailure]:
        """*Ours.* Returns the transfers that will not finish.

        Called after each forward pass, before anything of it is sampled, which is the last time for
        what the step itself loads; and after `get_finished`.
        """
        return []

    def build_worker_meta(self) -> object | None:
        """*Ours.* What this rank tells the scheduler, for `update_from_workers`; picklable.

        Called once a step, after `get_failed`; must not block. ``None``: there is nothing to tell.
        """
        return None

    def request_reset(self, request_id: int, num_committed: int) -> None:
        """*Ours.* The blocks of a request that was preempted or sent back go when this returns.

        Called between two forward passes. As after `wait_for_save`, every byte that is read from
        the blocks has left them then, or the stream of the forward passes waits for that.

        Args:
            request_id: whose; it may come again, with other blocks.
            num_committed: its leading tokens that are valid. Of a sliding window it holds only the
                blocks that this position needs.
        """

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """*Ours.* `wakeup` may be called from any thread when something finished.

        A class that does so says it with ``wakes = True``; others are polled.
        """

    wakes: bool = False

    def cancel(self, request_id: int) -> None:
        """*Ours.* No request waits for this load any more; `get_finished` still returns its id."""

    def shutdown(self) -> None:
        """*Ours.* Finish what is staged, release everything; idempotent."""
