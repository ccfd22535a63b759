"""The leader's half of a connector, which decides what is loaded and saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from kvconnect.connector.data import LlmArgs, SchedulerOutput
from kvconnect.request import LlmRequest


class KvCacheConnectorScheduler(ABC):
    """Decides what is loaded and saved. Lives on the leader, rank 0; called on the engine's thread.

    Names and signatures are TensorRT-LLM's, so that its connectors run here by changing an import.
    Methods marked *ours* have defaults. No method may block for long, because the engine waits.

    An error that a method raises for one request ends that request, and its ``result()`` raises the
    error. `request_aborted` follows, and `request_finished` if the request holds blocks. An error
    of a method for a whole step ends the engine.
    """

    def __init__(self, llm_args: LlmArgs) -> None:
        self._llm_args = llm_args

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object:
        """Returns the workers' instructions for this step; called every step that has a batch.

        The result must be picklable (it goes to every rank's worker); ``None`` is legal.
        """

    def build_idle_meta(self) -> object | None:
        """Returns the workers' instructions for a step without a batch; picklable (*ours*).

        Called in every such step. Unless it returns ``None``, `bind_connector_meta` gets the result
        before `get_finished` on every rank.
        """
        return None

    def update_from_workers(self, metas: Sequence[object]) -> None:
        """Receives the results of the ranks' `build_worker_meta` in this step (*ours*).

        Called once a step, also in idle steps, before a token is sampled or a request ends.

        Args:
            metas: the results by rank, without ``None``; often empty. All were sent through the
                communicator.
        """

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: LlmRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Returns how many tokens beyond `num_computed_tokens` can be loaded.

        `num_computed_tokens` is a multiple of tokens_per_block. Called once per admission, after
        the device match, and only when the pool has blocks for the request. If the second element
        is True, the load runs in the background: the request waits, the engine does not.

        A number above ``prompt_len - 1 - num_computed_tokens`` is reduced to that. The answer is
        dropped if it ends within a partial match on the device, or if no load of this request may
        start now. Then ``request.num_connector_matched_tokens`` is 0 at `update_state_after_alloc`,
        and the connector may not load any of its blocks.
        """

    def load_overlaps(self, request: LlmRequest) -> bool:
        """Returns whether the load that was just reported may overlap with computing (*ours*).

        Called after `get_num_new_matched_tokens` has returned a background load. If True, the load
        fills the blocks from the last one to the first, and the engine may compute the tokens
        before them meanwhile. From then on the request may be in `new_requests` and
        `cached_requests` although its load runs. When a step computes, no worker may write any more
        to blocks with tokens before ``computed_position + num_scheduled_tokens``. The load ends
        when all other blocks are loaded. Workers report `get_load_progress`.
        """
        return False

    def load_follows(self, request: LlmRequest) -> bool:
        """Returns whether the load that overlaps may also fill its first blocks first (*ours*).

        Called after `load_overlaps` has returned True. If True, the load is of a prompt that
        another engine may still compute. Workers report `get_load_heads`, too, and the engine
        computes while that engine is slower than this one would be.
        """
        return False

    @abstractmethod
    def request_finished(self, request: LlmRequest, cache_block_ids: list[int]) -> bool:
        """Returns whether the blocks of `request`, which ended or was aborted, are to be kept.

        The request still holds the blocks. True keeps them until every worker's `get_finished` has
        returned the id as saved, without a time limit. While saves that were not returned within
        ``save_timeout_s`` hold blocks, all saves together get at most ``max_loading_fraction`` of
        the pool. For a request beyond that `request_aborted` is called instead, and its blocks may
        not be read any more.
        """

    @abstractmethod
    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Receives the `block_ids` of `request`; called before `build_connector_meta` of the step.

        Called once after each `get_num_new_matched_tokens` that led to an admission, and at no
        other time.
        """

    def wait_for_initialization(self) -> None:
        """Blocks until the connector is ready; called once, before the first request (*ours*).

        The worker of this rank has its pools by then; workers of other ranks may not.
        """

    def blocks_replaced(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Receives new `block_ids` of `request`: a load may still write to the old ones (*ours*).

        The request is in `new_requests` of the next step, once more if it was before.
        """

    def on_new_request(self, request: LlmRequest) -> None:
        """Starts lookups for `request`, which enters the queue (*ours*)."""

    def request_reset(self, request: LlmRequest) -> None:
        """Handles the loss of all blocks of `request`, which goes back to the queue (*ours*).

        The request was preempted or sent back; it is admitted again later.
        """

    def request_aborted(self, request: LlmRequest) -> None:
        """Handles an abort; `request_finished` follows if `request` holds blocks (*ours*).

        May also replace `request_finished`, as described there.
        """

    def load_failed(self, request: LlmRequest, num_valid_tokens: int) -> None:
        """Handles a failed load: tokens from `num_valid_tokens` on are computed (*ours*)."""

    def on_rewind(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Handles rejected last tokens; `block_ids` are the blocks that are still held (*ours*)."""

    def get_kv_transfer_params(self, request: LlmRequest) -> dict[str, Any] | None:
        """Returns data that the client receives with the result; called at the end (*ours*)."""
        return None

    def take_events(self) -> Sequence[object]:
        """Returns the events since the last call (*ours*)."""
        return ()

    def shutdown(self) -> None:
        """Ends the scheduler, after every worker's `shutdown`; idempotent (*ours*)."""
