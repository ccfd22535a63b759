"""A step of vLLM in the form of the built-in pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvconnect.connector.data import RequestData, SchedulerOutput
from kvconnect.integrations.vllm.requests import Tracked


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """The order in which the pair has vLLM's KV cache groups: those of states come last.

    The pair reads from its first group how many blocks a request has. vLLM's first group may be one
    of states, which has few.

    Attributes:
        numbers: vLLM's number of each of the pair's groups; ``()``: the same in both.
        states: vLLM's numbers of the groups of states, the last of `numbers`.
        has_drafts: drafts of tokens may be computed, and rejected.
    """

    numbers: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    has_drafts: bool = False

    @property
    def num_attention(self) -> int:
        """The number of groups that hold keys and values, or latents."""
        return len(self.numbers) - len(self.states)

    def ordered(self, by_group: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Returns the block ids of vLLM's groups in the pair's order; those of none as they are."""
        if not self.states or not any(by_group):
            return by_group
        return [by_group[number] for number in self.numbers]

    def snapshots(
        self, output: Any, request: Any, end: int, tokens_per_block: int
    ) -> dict[tuple[int, int], int]:
        """Returns the blocks that hold states at the end of a block once the step is computed.

        Such a block may be overwritten in the next step. vLLM moves blocks of states, so their ids
        are those of the block table of this step.

        Args:
            output: vLLM's ``SchedulerOutput``.
            request: vLLM's.
            end: leading tokens that are computed after the step.
            tokens_per_block: of the pair.

        Returns:
            Ids of blocks, by vLLM's group and the block's number in the request.
        """
        name, state = request.request_id, getattr(output, "kv_connector_block_state", None)
        drafted = name in (getattr(output, "scheduled_spec_decode_tokens", None) or ())
        if state is None or drafted or (self.has_drafts and end > request.num_prompt_tokens):
            return {}
        # Blocks that vLLM caches itself: those at the end of the step, and checkpoints within it.
        found = {
            (group, tokens // tokens_per_block - 1): block_id
            for group, block_id, tokens in state.boundary_state_offloads.get(name, ())
            if tokens and tokens % tokens_per_block == 0
        }
        if end % tokens_per_block == 0 and (tables := state.get_block_ids(name)) is not None:
            number = end // tokens_per_block - 1
            for group in self.states:
                if number < len(tables[group]) and tables[group][number]:
                    found[group, number] = tables[group][number]
        return found


_NULL_BLOCK = 0  # vLLM's place holder, where a window, or a state, has no block


def held_blocks(block_ids: Sequence[int]) -> list[int]:
    """Returns `block_ids` in the pair's form: -1 if no block is held."""
    if _NULL_BLOCK not in block_ids:
        return list(block_ids)
    return [-1 if one == _NULL_BLOCK else one for one in block_ids]


def num_computed(output: Any) -> tuple[int, float]:
    """Returns the tokens that the step of `output` computes, and the sum of their contexts."""
    cached = output.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts.update((one.req_id, one.num_computed_tokens) for one in output.scheduled_new_reqs)
    context = 0.0
    for name, tokens in output.num_scheduled_tokens.items():
        context += tokens * (starts.get(name, 0) + tokens / 2)
    return output.total_num_scheduled_tokens, context


class StepReader:
    """Reads vLLM's ``SchedulerOutput``, and records in each `Tracked` how far it is computed.

    Args:
        tokens_per_block: of the pair.
        priority: of all blocks.
        groups: vLLM's KV cache groups, in the pair's order.
    """

    def __init__(self, tokens_per_block: int, priority: int, groups: GroupOrder) -> None:
        self._size = tokens_per_block
        self._priority = priority
        self._groups = groups

    def read(
        self,
        output: Any,
        known: Mapping[str, Tracked],
        starting: Sequence[tuple[Tracked, Sequence[Sequence[int]]]],
    ) -> SchedulerOutput | None:
        """Returns the step for the pair; ``None`` if no cached request is part of it.

        Args:
            output: vLLM's.
            known: the requests that are cached, by vLLM's ids; others are left out.
            starting: requests whose background loads begin, with their blocks by group.
        """
        step = SchedulerOutput()
        for one, block_ids in starting:
            by_group = [held_blocks(ids) for ids in self._groups.ordered(block_ids)]
            step.loading_requests.append(self._data(one, by_group, one.offered_at, 0))
        for data in output.scheduled_new_reqs:
            tracked = known.get(data.req_id)
            if tracked is not None and tracked.llm is not None:
                self._admit(tracked, data.block_ids, data.num_computed_tokens, output, step)
        self._cached_requests(output, known, step)
        has_news = step.new_requests or step.cached_requests or step.loading_requests
        return step if has_news else None

    def _admit(
        self,
        tracked: Tracked,
        block_ids: Sequence[Sequence[int]],
        computed: int,
        output: Any,
        step: SchedulerOutput,
    ) -> None:
        scheduled = output.num_scheduled_tokens[tracked.request.request_id]
        tracked.grow()
        tracked.computed = computed + scheduled
        tracked.num_full = tracked.num_states = 0
        if getattr(output, "has_sync_kv_loads", False):
            # Perhaps another connector's, which may fail: what stands on it waits for the next.
            computed = scheduled = 0
        else:
            tracked.num_full = self._certain(tracked)
        by_group = self._new_blocks(tracked, block_ids, output)
        step.new_requests.append(self._data(tracked, by_group, computed, scheduled))

    def _cached_requests(
        self, output: Any, known: Mapping[str, Tracked], step: SchedulerOutput
    ) -> None:
        cached = output.scheduled_cached_reqs
        resumed = cached.resumed_req_ids
        for index, name in enumerate(cached.req_ids):
            tracked = known.get(name)
            if tracked is None or tracked.llm is None:
                continue
            computed, new = cached.num_computed_tokens[index], cached.new_block_ids[index]
            if name in resumed:
                self._admit(tracked, new or ((),), computed, output, step)
                continue
            scheduled = output.num_scheduled_tokens[name]
            tracked.computed = computed + scheduled
            num_full = self._certain(tracked)
            if num_full == tracked.num_full and not new:
                continue
            tracked.num_full = num_full
            tracked.grow()
            by_group = self._new_blocks(tracked, new or (), output)
            step.cached_requests.append(self._data(tracked, by_group, computed, scheduled))

    def _certain(self, tracked: Tracked) -> int:
        """Returns how many full blocks of known tokens are valid after this step."""
        known: int = tracked.request.num_tokens
        return min(tracked.computed, known) // self._size

    def _new_blocks(
        self, tracked: Tracked, block_ids: Sequence[Sequence[int]], output: Any
    ) -> list[list[int]]:
        """Returns the new `block_ids` by the pair's groups.

        Those of states are reported when they are full: before that they are not snapshots.
        """
        by_group = [held_blocks(ids) for ids in self._groups.ordered(block_ids)]
        if not self._groups.states:
            return by_group
        known = range(tracked.num_states, max(tracked.num_states, tracked.num_full))
        tracked.num_states = known.stop
        snapshots = self._groups.snapshots(output, tracked.request, tracked.computed, self._size)
        attention = by_group[: self._groups.num_attention]
        attention += [[] for _ in range(self._groups.num_attention - len(attention))]
        states = [
            [snapshots.get((group, number), -1) for number in known]
            for group in self._groups.states
        ]
        return attention + states

    def _data(
        self, tracked: Tracked, by_group: Sequence[list[int]], computed: int, scheduled: int
    ) -> RequestData:
        first = by_group[0] if by_group else []
        return RequestData(
            request_id=tracked.started.request_id,
            new_tokens=[],
            new_block_ids=first,
            computed_position=computed,
            num_scheduled_tokens=scheduled,
            new_block_ids_by_group=tuple(by_group),
            priorities=[self._priority] * len(first),
        )
