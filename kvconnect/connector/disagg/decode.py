"""The prompts that are fetched from other engines, on the leader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvconnect.connector.data import LlmArgs, RequestData, SchedulerOutput
from kvconnect.connector.disagg.messages import FetchOrder
from kvconnect.connector.disagg.node import TransferNode
from kvconnect.connector.disagg.params import FetchParams, transfer_name, transfer_params
from kvconnect.connector.disagg.pools import end_of_transfer
from kvconnect.connector.io.lookup import blocks_needed
from kvconnect.errors import ConnectorContractError
from kvconnect.request import LlmRequest
from kvconnect.trace import count
from kvconnect.transfer.claimed import Claimed


@dataclass(slots=True, eq=False)
class _Fetch:
    """A request that fetches its prompt.

    Attributes:
        name, params: the transfer's name, and its parameters.
        claims: the claims on the other engine's blocks, one for each of its ranks that this rank
            reads. The worker takes over their ownership.
        num_tokens: the number of tokens that the other engine publishes.
        promised: true once `num_tokens` was reported to the runtime.
        overlaps: true if the request computes meanwhile.
    """

    name: str
    params: FetchParams
    claims: list[Claimed]
    num_tokens: int
    promised: bool = False
    overlaps: bool = False

    def drop(self) -> None:
        """Drops the claims."""
        for claim in self.claims:
            claim.drop()


@dataclass(slots=True)
class DecodeBook:
    """The requests that fetch their prompt, until their load is ordered."""

    node: TransferNode
    llm_args: LlmArgs
    _fetches: dict[int, _Fetch] = field(default_factory=dict)

    def begin(self, request: LlmRequest) -> None:
        """Claims the prompt of `request` if its parameters name one; does not block.

        Raises:
            ConfigurationError: see `transfer_params`.
        """
        params = transfer_params(request.kv_transfer_params, self.node.config.role)
        if not isinstance(params, FetchParams):
            return
        layouts = self.node.layouts
        num_tokens = params.num_tokens or end_of_transfer(request.num_tokens, layouts)
        # A peer of other tokens_per_block may end where there is no snapshot of states here.
        at_end = num_tokens == end_of_transfer(num_tokens + 1, layouts)
        if not 0 < num_tokens < request.num_tokens or not at_end:
            count("transfer.computed_instead", tokens=request.num_tokens)
            return
        model = self.llm_args.model_digest
        name = transfer_name(params.transfer_id, request, num_tokens, model)
        claims = self.node.claim(params.address, name, params.tp_size)
        self._fetches[request.request_id] = _Fetch(name, params, claims, num_tokens)

    def offer(self, request: LlmRequest, num_computed_tokens: int) -> int:
        """Returns the number of tokens beyond `num_computed_tokens` that may be fetched, or 0."""
        fetch = self._fetches.get(request.request_id)
        if fetch is None:
            return 0
        num_tokens = fetch.num_tokens - num_computed_tokens
        least = max(1, self.llm_args.kv_connector_config.min_load_tokens)
        if num_tokens < least or any(claim.failed for claim in fetch.claims):
            self.drop(request)
            if num_tokens > 0:
                count("transfer.computed_instead", tokens=num_tokens)
            return 0
        fetch.promised = True
        return num_tokens

    def fetches(self, request: LlmRequest) -> bool:
        """Returns whether the tokens that were matched for `request` come from a peer."""
        fetch = self._fetches.get(request.request_id)
        return fetch is not None and fetch.promised

    def overlaps(self, request: LlmRequest) -> bool:
        """Returns whether `request` computes while the tokens that were matched are fetched."""
        fetch = self._fetches.get(request.request_id)
        if fetch is None or not (fetch.promised and self.node.overlaps):
            return False
        fetch.overlaps = True
        return True

    def admitted(self, request: LlmRequest) -> None:
        """Drops the claims of `request` unless the runtime loads the promised tokens now."""
        fetch = self._fetches.get(request.request_id)
        if fetch is not None and not (fetch.promised and request.num_connector_matched_tokens):
            self.drop(request)

    def orders(self, output: SchedulerOutput) -> Iterator[FetchOrder]:
        """Yields the loads that start in this step."""
        for data in output.loading_requests:
            if fetch := self._fetches.pop(data.request_id, None):
                yield self._order(fetch, data)

    def _order(self, fetch: _Fetch, data: RequestData) -> FetchOrder:
        size, end = self.llm_args.tokens_per_block, fetch.num_tokens
        start = data.computed_position - data.computed_position % size
        by_group = data.new_block_ids_by_group or (data.new_block_ids,)
        firsts, blocks, layouts = [], [], self.node.layouts
        for layout, ids in zip(layouts, by_group[: len(layouts)], strict=True):
            needed = blocks_needed(layout.window, end, size)
            first = max(start // size, needed.start)
            own = ids[first : needed.stop]
            if len(own) < needed.stop - first or -1 in own:
                raise ConnectorContractError(
                    f"request {data.request_id}: no block for some of the tokens from "
                    f"{first * size} on, which a load up to {end} fills; the cache manager has "
                    "to reserve them"
                )
            firsts.append(first)
            blocks.append(own)
        return FetchOrder(
            request_id=data.request_id,
            name=fetch.name,
            address=fetch.params.address,
            start=start,
            end=end,
            first_blocks=tuple(firsts),
            blocks=tuple(blocks),
            tp_size=fetch.params.tp_size,
            overlaps=fetch.overlaps,
        )

    def drop(self, request: LlmRequest) -> None:
        """Drops the claims of `request`, unless a worker owns them. Idempotent."""
        if fetch := self._fetches.pop(request.request_id, None):
            fetch.drop()

    failed = drop

    def close(self) -> None:
        """Drops all claims."""
        while self._fetches:
            self._fetches.popitem()[1].drop()
