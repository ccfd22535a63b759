"""The prompts that other engines may fetch, on the leader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvconnect.connector.data import LlmArgs, RequestData, SchedulerOutput
from kvconnect.connector.disagg.messages import EndOrder, PublishOrder
from kvconnect.connector.disagg.node import TransferNode
from kvconnect.connector.disagg.params import PrefillParams, transfer_name, transfer_params
from kvconnect.connector.disagg.pools import end_of_transfer
from kvconnect.connector.io.lookup import blocks_needed
from kvconnect.request import LlmRequest
from kvconnect.shards import dividing_rank


@dataclass(slots=True, eq=False)
class _Prompt:
    """A request whose prompt is published.

    Attributes:
        request: the runtime's request.
        transfer_id: the id in its parameters, or one made here.
        num_tokens: the number of tokens that are published; the reader computes the others.
        name: the transfer's name on the control channel.
        num_blocks: the number of block ids of each pool group that were sent to the workers;
            ``None``: no order was sent.
        has_states: true if the request has the recurrent states at the end of these tokens, or the
            model has none.
    """

    request: LlmRequest
    transfer_id: str
    num_tokens: int
    name: str
    num_blocks: list[int] | None = None
    has_states: bool = False


@dataclass(slots=True)
class PrefillBook:
    """The requests whose prompts are published, and the blocks of each that workers received."""

    node: TransferNode
    llm_args: LlmArgs
    _prompts: dict[int, _Prompt] = field(default_factory=dict)
    _results: dict[int, dict[str, Any]] = field(default_factory=dict)
    _aborted: list[int] = field(default_factory=list)

    def begin(self, request: LlmRequest) -> None:
        """Adds `request` if its parameters ask for its prompt to be published.

        Raises:
            ConfigurationError: see `transfer_params`.
        """
        params = transfer_params(request.kv_transfer_params, self.node.config.role)
        if not isinstance(params, PrefillParams):
            return
        # Returned if the prompt is not published after all: the reader computes it.
        self._results[request.request_id] = {"engine": self.node.engine_id, "tokens": 0}
        num_tokens = end_of_transfer(request.prompt_len, self.node.layouts)
        if num_tokens == 0:
            return
        transfer_id = params.transfer_id or self.node.new_transfer_id()
        name = transfer_name(transfer_id, request, num_tokens, self.llm_args.model_digest)
        self._prompts[request.request_id] = _Prompt(request, transfer_id, num_tokens, name)

    def admitted(self, request: LlmRequest) -> None:
        """Marks the blocks of `request` as new, so that the next order sends all their ids."""
        if prompt := self._prompts.get(request.request_id):
            prompt.num_blocks = None

    reset = admitted

    def aborted(self, request: LlmRequest) -> None:
        """Ends an aborted request; fails the claims of waiting readers if no order was sent yet."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            return
        if prompt.num_blocks is None:
            del self._prompts[request.request_id]
            self.node.offers.refuse(prompt.name)
        else:
            self._aborted.append(request.request_id)

    def take_lost(self) -> tuple[int, ...]:
        """Returns, once, aborted requests that workers publish and that missed `finished`."""
        aborted, self._aborted = self._aborted, []
        return tuple(one for one in aborted if self._prompts.pop(one, None) is not None)

    def orders(self, output: SchedulerOutput) -> Iterator[PublishOrder]:
        """Yields an order for each published prompt that the step continues to compute."""
        if not self._prompts:
            return
        for data in output.new_requests:
            if prompt := self._prompts.get(data.request_id):
                prompt.num_blocks = None
                yield self._order(prompt, data)
        for data in output.cached_requests:
            prompt = self._prompts.get(data.request_id)
            # A prompt that is computed needs no order before its end.
            if prompt is not None and data.computed_position <= prompt.num_tokens:
                yield self._order(prompt, data)

    def _order(self, prompt: _Prompt, data: RequestData) -> PublishOrder:
        by_group = (data.new_block_ids_by_group or (data.new_block_ids,))[: len(self.node.layouts)]
        begins = prompt.num_blocks is None
        told = prompt.num_blocks or [0] * len(by_group)
        self._look_for_states(prompt, told, by_group)
        prompt.num_blocks = [known + len(ids) for known, ids in zip(told, by_group, strict=True)]
        # KV computed after a load of the same step is right only if the load succeeds; a later step
        # confirms that.
        sure = not prompt.request.num_external_tokens
        computed = data.computed_position + data.num_scheduled_tokens if sure else 0
        return PublishOrder(
            request_id=data.request_id,
            name=prompt.name,
            begins=begins,
            num_tokens=prompt.num_tokens,
            first_blocks=tuple(told),
            blocks=by_group,
            valid=min(data.computed_position, prompt.num_tokens),
            computed=min(computed, prompt.num_tokens),
        )

    def _look_for_states(
        self, prompt: _Prompt, told: Sequence[int], by_group: Sequence[list[int]]
    ) -> None:
        """Records whether the step's blocks have the snapshot of states at the prompt's end."""
        if prompt.num_blocks is None:
            prompt.has_states = self.node.layouts[-1].kind != "state"
        if self.node.layouts[-1].kind == "state":
            at = prompt.num_tokens // self.llm_args.tokens_per_block - 1 - told[-1]
            if 0 <= at < len(by_group[-1]):
                prompt.has_states = by_group[-1][at] >= 0

    def finished(self, request: LlmRequest) -> EndOrder | None:
        """Returns the order that ends the publication of `request` on the workers.

        Returns ``None`` if no worker publishes the request. Otherwise its blocks are kept until the
        workers report that its leases ended, even if it was aborted. A block that is freed earlier
        could be overwritten while a peer reads it.
        """
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None or prompt.num_blocks is None:
            return None
        whole = request.is_finished_normal and self._holds(request, prompt)
        if whole:
            self._results[request.request_id] = {
                "transfer_id": prompt.transfer_id,
                "address": self.node.address,
                "engine": self.node.engine_id,
                "tokens": prompt.num_tokens,
            }
            _, ranks = dividing_rank(self.llm_args.stored_heads)
            if ranks > 1:
                self._results[request.request_id]["tp_size"] = ranks
        return EndOrder(request.request_id, prompt.num_tokens if whole else 0)

    def _holds(self, request: LlmRequest, prompt: _Prompt) -> bool:
        """Returns whether `request` holds every block that a reader of `prompt` needs.

        Windows free the blocks behind them as a request generates, and the next snapshot of states
        frees the one before. With ``max_tokens=0`` every block is there.
        """
        computed, size = request.num_computed_tokens, self.llm_args.tokens_per_block
        return computed >= prompt.num_tokens and all(
            prompt.has_states and computed // size == prompt.num_tokens // size
            if layout.kind == "state"
            else blocks_needed(layout.window, computed, size).start
            <= blocks_needed(layout.window, prompt.num_tokens, size).start
            for layout in self.node.layouts
        )

    def take_params(self, request: LlmRequest) -> dict[str, Any] | None:
        """Returns the parameters that a reader of an ended request needs; once."""
        return self._results.pop(request.request_id, None)
