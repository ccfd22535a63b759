"""The leader's half of a connector: what to load and save."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from kvconnect.connector.data import LlmArgs, SchedulerOutput
from kvconnect.request import LlmRequest

__all__ = ["KvCacheConnectorScheduler"]


class KvCacheConnectorScheduler(ABC):
    """Decides what is loaded and saved. Lives on the leader, rank 0; called on the engine's thread.

    Names and signatures are TensorRT-LLM's, so that its connectors run here by changing an import.
    Methods marked *ours* have defaults. None may block for long: the engine waits.

    What a method raises for one request ends that request by the error, which its ``result()``
    raises; `request_aborted`, and `request_finished` if it holds blocks, follow. What the methods
    of a whole step raise ends the engine.
    """

    def __init__(self, llm_args: LlmArgs) -> None:
        self._llm_args = llm_args

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object:
        """What the workers are to do in this step; called every step that has a batch.

        The result must be picklable (it goes to every rank's worker); ``None`` is legal.
        """

    def build_idle_meta(self) -> object | None:
        """*Ours.* What the workers are to do in a step without a batch; picklable.

        Called in every such step. Unless it is ``None``, `bind_connector_meta` gets it before
        `get_finished` on every rank.
        """
        return None

    def update_from_workers(self, metas: Sequence[object]) -> None:
        """*Ours.* What the ranks' `build_worker_meta` returned in this step, but for ``None``.

        Called once a step, idle steps too, before anything of the step is sampled or ends.

        Args:
            metas: by rank, often empty; each one came through the communicator.
        """

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: LlmRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens beyond `num_computed_tokens` (a multiple of tokens_per_block) that can be loaded.

        Called once per admission, after the device match, only when the blocks are surely there.
        True as second element loads in the background: the request waits, the engine does not.
        More than ``prompt_len - 1 - num_computed_tokens`` is cut. The answer is dropped if it
        reaches no further than a partial match on the device, or if no load of this request may
        start now; then ``request.num_connector_matched_tokens`` is 0 at `update_state_after_alloc`,
        and nothing of it may be loaded.
        """

    @abstractmethod
    def request_finished(self, request: LlmRequest, cache_block_ids: list[int]) -> bool:
        """Generation ended or was aborted; the blocks are still there.

        True keeps them until every worker's `get_finished` has returned the id as saved, however
        long that takes. While saves that were not returned within ``save_timeout_s`` hold blocks,
        all saves together get at most ``max_loading_fraction`` of the pool: for a request beyond
        that `request_aborted` is called instead, and nothing of it may be read any more.
        """

    @abstractmethod
    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]) -> None:
        """`request` was given `block_ids`; comes before `build_connector_meta` of the same step.

        Called once after each `get_num_new_matched_tokens` that led to an admission, never without.
        """

    def wait_for_initialization(self) -> None:
        """*Ours.* Blocks until the connector is ready; called once, before the first request.

        The worker of this rank has its pools by then, those of other ranks may not.
        """

    def blocks_replaced(self, request: LlmRequest, block_ids: list[int]) -> None:
        """*Ours.* `request` holds `block_ids` from now on: a load may still write to old ones.

        It is in `new_requests` of the next step, once more if it was before.
        """

    def on_new_request(self, request: LlmRequest) -> None:
        """*Ours.* `request` enters the queue: start looking things up."""

    def request_reset(self, request: LlmRequest) -> None:
        """*Ours.* `request` was preempted or sent back: its blocks are gone; it comes again."""

    def request_aborted(self, request: LlmRequest) -> None:
        """*Ours.* `request` was aborted; `request_finished` follows if it holds blocks.

        Also called instead of that, see there.
        """

    def load_failed(self, request: LlmRequest, num_valid_tokens: int) -> None:
        """*Ours.* Its load did not succeed; tokens from `num_valid_tokens` on are computed."""

    def on_rewind(self, request: LlmRequest, block_ids: list[int]) -> None:
        """*Ours.* Its last tokens were rejected; `block_ids` are the blocks it still holds."""

    def get_kv_transfer_params(self, request: LlmRequest) -> dict[str, Any] | None:
        """*Ours.* Data to hand to the client with the result; asked for at the end."""
        return None

    def take_events(self) -> Sequence[object]:
        """*Ours.* Events since the last call."""
        return ()

    def shutdown(self) -> None:
        """*Ours.* The end, after every worker's `shutdown`; idempotent."""
