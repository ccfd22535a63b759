"""Requests that ended while their blocks are still being saved: what they hold is of use."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from kvconnect import KvCacheConnectorConfig, SamplingParams
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.connector.worker import KvCacheConnectorWorker

T = 16
MODULE = "connector_of_slow_saves"
GREEDY = SamplingParams(max_tokens=9, ignore_eos=True)


class Leader(KvCacheConnectorScheduler):
    """Keeps every request's blocks."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, block_ids): ...

    def build_connector_meta(self, scheduler_output):
        return None

    def request_finished(self, request, cache_block_ids):
        return True


class Worker(KvCacheConnectorWorker):
    """Returns what it saved once it is told to."""

    may_end = False

    def register_kv_caches(self, kv_cache_tensor):
        self.saving: list[int] = []

    def start_load_kv(self, stream): ...

    def wait_for_layer_load(self, layer_idx, stream): ...

    def save_kv_layer(self, layer_idx, stream): ...

    def wait_for_save(self, stream): ...

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        self.saving += finished_gen_req_ids
        ended = self.saving if self.may_end else []
        self.saving = [] if self.may_end else self.saving
        return ended, []


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> KvCacheConnectorConfig:
    module = ModuleType(MODULE)
    module.Leader, module.Worker = Leader, Worker
    monkeypatch.setitem(sys.modules, MODULE, module)
    return KvCacheConnectorConfig(
        connector_module=MODULE,
        connector_scheduler_class="Leader",
        connector_worker_class="Worker",
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
