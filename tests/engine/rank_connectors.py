"""Connectors that fail on one rank. In a module of its own, since ranks import it by name."""

from __future__ import annotations

from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.connector.worker import KvCacheConnectorWorker


class Scheduler(KvCacheConnectorScheduler):
    """Has nothing."""

    def build_connector_meta(self, scheduler_output):
        return None

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def request_finished(self, request, cache_block_ids):
        return False

    def update_state_after_alloc(self, request, block_ids):
        pass


class Worker(KvCacheConnectorWorker):
    """Does nothing."""

    def register_kv_caches(self, kv_cache_tensor):
        pass

    def start_load_kv(self, stream):
        pass

    def wait_for_layer_load(self, layer_idx, stream):
        pass

    def save_kv_layer(self, layer_idx, stream):
        pass

    def wait_for_save(self, stream):
        pass

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        return [], []


class FollowerFails(Worker):
    """The second rank's raises amid the forward pass."""

    def save_kv_layer(self, layer_idx, stream):
        if layer_idx == 1 and self._llm_args.rank == 1:
            raise RuntimeError("the second rank has had enough")


class LeaderFails(Worker):
    """The first rank's raises amid the forward pass."""

    def save_kv_layer(self, layer_idx, stream):
        if layer_idx == 1 and self._llm_args.rank == 0:
            raise RuntimeError("the first rank has had enough")


class FailsToStart(Worker):
    """The second rank's cannot be made."""

    def __init__(self, llm_args):
        super().__init__(llm_args)
        if llm_args.rank == 1:
            raise ValueError("no room on the second rank")
