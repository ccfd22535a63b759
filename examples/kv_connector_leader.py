"""The leader's half of `kv_connector.py`: decides which blocks are loaded and saved."""

from __future__ import annotations

from dataclasses import dataclass, field

from block_files import BlockTransfer, PersistentKvCacheConnectorMetadata, file_of, folder

from kvconnect.connector.data import LlmArgs, RequestData, SchedulerOutput
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.keys import BlockKey
from kvconnect.request import LlmRequest


@dataclass
class Progress:
    """A request's blocks, and how many leading ones are in files or on their way there."""

    block_ids: list[int] = field(default_factory=list)
    num_saved: int = 0


class PersistentKvCacheConnectorLeader(KvCacheConnectorScheduler):
    """Decides which blocks are read from files and which are written."""

    def __init__(self, llm_args: LlmArgs) -> None:
        super().__init__(llm_args)
        self._tokens_per_block = llm_args.kv_cache_config.tokens_per_block
        folder().mkdir(parents=True, exist_ok=True)
        self._matches: dict[int, range] = {}  # blocks that were matched and not yet loaded
        self._progress: dict[int, Progress] = {}

    def get_num_new_matched_tokens(
        self, request: LlmRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Counts the full blocks that follow and have all their files, short of the last token."""
        first = num_computed_tokens // self._tokens_per_block
        end = first
        for key in request.block_keys(first, (request.num_tokens - 1) // self._tokens_per_block):
            if not self._is_stored(key):
                break
            end += 1
        self._matches[request.request_id] = range(first, end)
        return (end - first) * self._tokens_per_block, False

    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Drops a match that the runtime does not use; the step's report names the blocks."""
        if not request.num_connector_matched_tokens:
            self._matches.pop(request.request_id, None)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object:
        """Loads what was matched, and saves every block that is full of valid KV after this step.

        In a step that loads for a request, none of its blocks is saved. A rank does not know yet
        whether the load failed on another rank, and the blocks that follow are computed from the
        loaded ones. The next step saves them.
        """
        metadata = PersistentKvCacheConnectorMetadata()
        for data in scheduler_output.new_requests:
            self._progress[data.request_id] = Progress()
            metadata.load += self._loads(data)
        loading = {one.request_id for one in metadata.load}
        for data in scheduler_output.new_requests + scheduler_output.cached_requests:
            self._progress[data.request_id].block_ids += data.new_block_ids
            if data.request_id not in loading:
                metadata.save += self._saves(data)
        return metadata

    def _loads(self, data: RequestData) -> list[BlockTransfer]:
        blocks = self._matches.pop(data.request_id, range(0))
        self._progress[data.request_id].num_saved = blocks.stop
        return [self._transfer(data, index, data.new_block_ids[index]) for index in blocks]

    def _saves(self, data: RequestData) -> list[BlockTransfer]:
        progress = self._progress[data.request_id]
        computed = data.computed_position + data.num_scheduled_tokens
        num_full = min(computed // self._tokens_per_block, len(data.block_keys))
        filled = range(progress.num_saved, num_full)
        progress.num_saved = max(progress.num_saved, num_full)
        blocks = [self._transfer(data, index, progress.block_ids[index]) for index in filled]
        return [one for one in blocks if not self._is_stored(one.key)]

    def load_failed(self, request: LlmRequest, num_valid_tokens: int) -> None:
        """Marks the blocks from there on as unsaved: they are computed, and saved again."""
        progress = self._progress.get(request.request_id)
        if progress is not None:
            valid = num_valid_tokens // self._tokens_per_block
            progress.num_saved = min(progress.num_saved, valid)

    def request_reset(self, request: LlmRequest) -> None:
        """Forgets the request, which lost its blocks."""
        self._forget(request)

    def request_finished(self, request: LlmRequest, cache_block_ids: list[int]) -> bool:
        """Forgets the request. Saves end with their step, so no block needs to be kept."""
        self._forget(request)
        return False

    def _forget(self, request: LlmRequest) -> None:
        self._matches.pop(request.request_id, None)
        self._progress.pop(request.request_id, None)

    def _transfer(self, data: RequestData, index: int, block_id: int) -> BlockTransfer:
        first_token = index * self._tokens_per_block
        return BlockTransfer(data.block_keys[index], block_id, data.request_id, first_token)

    def _is_stored(self, key: BlockKey) -> bool:
        return all(file_of(share).exists() for share in self._llm_args.shard.store_keys(key))
