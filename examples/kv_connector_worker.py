"""A rank's half of `kv_connector.py`: copies blocks between files and the pool."""

from __future__ import annotations

import sys

from block_files import PersistentKvCacheConnectorMetadata, file_of, read_block, write_block
from safetensors import SafetensorError
from torch import Tensor

from kvconnect.connector.data import Direction, LlmArgs, TransferFailure
from kvconnect.connector.stream import ForwardStream
from kvconnect.connector.worker import KvCacheConnectorWorker


class PersistentKvCacheConnectorWorker(KvCacheConnectorWorker):
    """Copies this rank's share of blocks from files to the pool, and back."""

    def __init__(self, llm_args: LlmArgs) -> None:
        super().__init__(llm_args)
        self._shard = llm_args.shard
        self._failed: dict[int, TransferFailure] = {}

    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        """Keeps the pool, ``[num_blocks, num_layers, kv_factor, elements]``."""
        self._pool = kv_cache_tensor

    def start_load_kv(self, stream: ForwardStream) -> None:
        """Reads the step's files into the pool. A request's first bad file ends its load."""
        for one in self._step().load:
            if one.request_id in self._failed:
                continue
            file = file_of(self._shard.store_key(one.key))
            try:
                block = read_block(file, self._pool[one.block_id])
            except (OSError, ValueError, SafetensorError) as error:
                print(f"cannot load {file}: {error}", file=sys.stderr)
                file.unlink(missing_ok=True)
                self._failed[one.request_id] = TransferFailure(
                    one.request_id, Direction.LOAD, one.first_token, str(error)
                )
            else:
                self._pool[one.block_id].copy_(block)

    def wait_for_layer_load(self, layer_idx: int, stream: ForwardStream) -> None:
        """Does nothing: `start_load_kv` loads everything."""

    def save_kv_layer(self, layer_idx: int, stream: ForwardStream) -> None:
        """Does nothing: `wait_for_save` saves whole blocks."""

    def wait_for_save(self, stream: ForwardStream) -> None:
        """Writes this rank's share of the blocks, unless a rank with the same heads does."""
        if not self._shard.is_first():
            return
        for one in self._step().save:
            file = file_of(self._shard.store_key(one.key))
            if file.exists():
                continue
            try:
                write_block(file, self._pool[one.block_id].cpu())
            except OSError as error:
                print(f"cannot save {file}: {error}", file=sys.stderr)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Returns two empty lists, as no transfer runs in the background."""
        return [], []

    def get_failed(self) -> list[TransferFailure]:
        """Returns the loads of this step that met a bad file."""
        failed, self._failed = list(self._failed.values()), {}
        return failed

    def _step(self) -> PersistentKvCacheConnectorMetadata:
        metadata = self.get_connector_meta()
        if not isinstance(metadata, PersistentKvCacheConnectorMetadata):
            return PersistentKvCacheConnectorMetadata()
        return metadata
