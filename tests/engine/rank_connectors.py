"""Connectors that fail, for a request or on a rank; other ranks import this module by name."""

from __future__ import annotations

from kvconnect.connector.data import Direction, TransferFailure
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.connector.worker import KvCacheConnectorWorker


class Planted(RuntimeError):
    """An error of a connector here."""


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
        return finished_gen_req_ids, started_loading_req_ids


class Picky(Scheduler):
    """Raises for a request in the method that its ``kv_transfer_params`` name.

    They may also say what it offers for it (``match``, ``loads``), and whether it saves (``keep``).
    """

    def on_new_request(self, request):
        self._at("on_new_request", request)
        self._at("arrival", request, SystemExit)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self._at("get_num_new_matched_tokens", request)
        params = request.kv_transfer_params or {}
        return params.get("match", 0), params.get("loads", False)

    def update_state_after_alloc(self, request, block_ids):
        self._at("update_state_after_alloc", request)

    def request_finished(self, request, cache_block_ids):
        self._at("request_finished", request)
        return (request.kv_transfer_params or {}).get("keep", False)

    def request_aborted(self, request):
        self._at("request_aborted", request)

    def request_reset(self, request):
        self._at("request_reset", request)

    def on_rewind(self, request, block_ids):
        self._at("on_rewind", request)

    def get_kv_transfer_params(self, request):
        self._at("get_kv_transfer_params", request)

    def _at(self, method, request, error=Planted):
        if (request.kv_transfer_params or {}).get("raise_in") == method:
            raise error(f"{method} of one request")


class FollowerCannotLoad(Worker):
    """The second rank fails every load, and raises for one that it did not end."""

    def get_failed(self):
        if self._llm_args.rank == 0:
            return []
        failed, self._loading = self._loading, []
        return [
            TransferFailure(one, Direction.LOAD, 0, "planted", writes_ended=False) for one in failed
        ]

    _loading = ()
    _to_return = ()

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        if self._llm_args.rank == 0:
            return [], started_loading_req_ids
        self._loading = started_loading_req_ids
        returned, self._to_return = list(self._to_return), []
        return [], returned

    def cancel(self, request_id):
        self._to_return = [request_id]
        if self._llm_args.rank == 1:
            raise RuntimeError("cancel of one request")


class FollowerFails(Worker):
    """The second rank's raises amid the forward pass."""

    rank = 1
    error: BaseException = RuntimeError("the second rank has had enough")

    def save_kv_layer(self, layer_idx, stream):
        if layer_idx == 1 and self._llm_args.rank == self.rank:
            raise self.error


class LeaderFails(FollowerFails):
    """The first rank's does."""

    rank = 0
    error = RuntimeError("the first rank has had enough")


class FollowerExits(FollowerFails):
    """The second rank's asks its process to end."""

    error = SystemExit("planted")


class FollowerIsInterrupted(FollowerFails):
    """As by Ctrl-C."""

    error = KeyboardInterrupt("planted")


class LeaderExits(LeaderFails):
    """The first rank's asks its process to end."""

    error = SystemExit("planted")


class FailsToStart(Worker):
    """The second rank's cannot be made."""

    def __init__(self, llm_args):
        super().__init__(llm_args)
        if llm_args.rank == 1:
            raise ValueError("no room on the second rank")


class FollowerExitsAtStart(Worker):
    """The second rank's asks its process to end when it is made."""

    def __init__(self, llm_args):
        super().__init__(llm_args)
        if llm_args.rank == 1:
            raise SystemExit("planted")


class TooMuchToTell(Scheduler):
    """Has more to tell its workers than an exchange takes."""

    def build_connector_meta(self, scheduler_output):
        return [bytearray(1 << 28) for _ in range(5)]
