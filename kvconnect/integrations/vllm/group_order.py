"""The order of vLLM's KV cache groups in the pair, and the snapshots of states of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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


SAME_ORDER = GroupOrder()
"""For a model without states: the pair has vLLM's groups as they are."""
