"""Requests that ended while their blocks are still being saved: what they hold is of use."""

from __future__ import annotations

import pytest
import rank_connectors

from kvconnect import KvCacheConnectorConfig, SamplingParams

T = 16
GREEDY = SamplingParams(max_tokens=9, ignore_eos=True)


class Leader(rank_connectors.Scheduler):
    """Keeps every request's blocks."""

    def request_finished(self, request, cache_block_ids):
        return True


class Worker(rank_connectors.Worker):
    """Returns what it saved once it is told to."""

    may_end = False

    def register_kv_caches(self, kv_cache_tensor):
        self.saving: list[int] = []

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        self.saving += finished_gen_req_ids
        ended = self.saving if self.may_end else []
        self.saving = [] if self.may_end else self.saving
        return ended, []


@pytest.fixture
def connector() -> KvCacheConnectorConfig:
    return KvCacheConnectorConfig(
        connector_module=__name__,
        connector_scheduler_class=Leader.__name__,
        connector_worker_class=Worker.__name__,
    )


@pytest.mark.parametrize("length", [5, 16, 70])
def test_the_tail_is_reused_while_its_save_is_pending(
    length, connector, llama, open_llm, reference, monkeypatch
) -> None:
    prompt = list(range(1, length + 1))
    llm = open_llm(llama, connector=connector)
    first = llm.generate([prompt], GREEDY)[0]
    assert llm.stats().saving_requests == 1
    said = [*prompt, *first.output_token_ids]
    again = llm.generate([[*said, 7, 8]], GREEDY)[0]
    # The last token of the first request was never fed back.
    assert again.reused_device_tokens == len(said) - 1
    assert [list(again.output_token_ids)] == reference(llama, [[*said, 7, 8]], 9)
    assert llm.stats().saving_requests == 2
    blocks = llm._engine._kv.blocks
    blocks.check_invariants()
    monkeypatch.setattr(Worker, "may_end", True)
    llm.generate([[1]], GREEDY)
    llm.close()
    blocks.check_invariants()
    assert blocks.num_free_blocks() == blocks.max_blocks()
