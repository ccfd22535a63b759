"""A persistent KV cache by subclassing the connector API: a safetensors file per block and rank.

Usage: ``python examples/kv_connector.py MODEL_DIR [--tensor-parallel-size N]``

It answers a prompt, destroys the engine, makes a new one with the same connector and answers again:
the blocks come from the files and the answer is the same.

A block's chained key stands for the whole prefix, the model, the cache's geometry and the tenant's
salt. It is the same on every rank, and each rank holds other heads of the block: so a file has the
name of the rank's own share, ``llm_args.shard.store_key(block_key)``. The leader finds a block if
the files of all shares are there. Each worker copies blocks between its pool and its files. A file
that is missing, damaged or of another block is a failed load: the runtime then computes those
tokens on all ranks, and the file is written again.

To keep it short, loads and saves run inside the engine's step, only whole blocks are stored, and
nothing bounds the folder. `kvconnect.connector.pair.worker` does all that.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from kvconnect import LLM, KvCacheConnectorConfig, SamplingParams
from kvconnect.connector.data import (
    Direction,
    LlmArgs,
    RequestData,
    SchedulerOutput,
    TransferFailure,
)
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.connector.stream import ForwardStream
from kvconnect.connector.worker import KvCacheConnectorWorker
from kvconnect.keys import BlockKey
from kvconnect.request import LlmRequest

CACHE_FOLDER = "CONNECTOR_CACHE_FOLDER"
"""The environment variable that names the folder; default: ``./connector_cache``."""


def _folder() -> Path:
    return Path(os.environ.get(CACHE_FOLDER, "connector_cache"))


def _file(share: BlockKey) -> Path:
    return _folder() / f"{share.hex()}.safetensors"


@dataclass(frozen=True)
class BlockTransfer:
    """A block to load or save: its key, its id, its request, and its first token.

    It is the same for all ranks; each rank names its own file.
    """

    key: BlockKey
    block_id: int
    request_id: int
    first_token: int


@dataclass
class PersistentKvCacheConnectorMetadata:
    """The loads and saves of one step."""

    load: list[BlockTransfer] = field(default_factory=list)
    save: list[BlockTransfer] = field(default_factory=list)


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
        _folder().mkdir(parents=True, exist_ok=True)
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
        return all(_file(share).exists() for share in self._llm_args.shard.store_keys(key))


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
            file = _file(self._shard.store_key(one.key))
            try:
                block = _read_block(file, self._pool[one.block_id])
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
            file = _file(self._shard.store_key(one.key))
            if file.exists():
                continue
            try:
                _write_block(file, self._pool[one.block_id].cpu())
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


def _digest(file: Path, block: Tensor) -> Tensor:
    # Covers the name, so that a sound file under another block's name is detected, too.
    state = xxhash.xxh3_128(file.name.encode())
    state.update(block.contiguous().view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(state.digest()), dtype=torch.uint8)


def _read_block(file: Path, like: Tensor) -> Tensor:
    # From memory: a file that is cut short while it is mapped would kill the process.
    tensors = safetensors.torch.load(file.read_bytes())
    if tensors.keys() != {"block", "digest"}:
        raise ValueError("holds no block")
    block = tensors["block"]
    if block.shape != like.shape or block.dtype != like.dtype:
        raise ValueError(f"holds a block {tuple(block.shape)} of {block.dtype}")
    if not torch.equal(_digest(file, block), tensors["digest"]):
        raise ValueError("is damaged")
    return block


def _write_block(file: Path, block: Tensor) -> None:
    """Writes under a temporary name, then renames, so that a file is whole or absent."""
    data = safetensors.torch.save({"block": block.contiguous(), "digest": _digest(file, block)})
    handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        Path(temporary).replace(file)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


PROMPT = (
    "A language model reads a prompt before it answers, and keeps for every token of it a key and "
    "a value in each of its layers. That memory is the KV cache. It depends on nothing but the "
    "model and the tokens, so whoever asks with the same beginning again need not wait for it to "
    "be computed again, if only somebody kept it. How would you keep it?"
)


def main() -> None:
    """Answer the same prompt with two engines, one after the other."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", metavar="MODEL", help="directory of a Hugging Face causal LM")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="ranks")
    options = parser.parse_args()
    connector = KvCacheConnectorConfig(
        connector_module=Path(__file__).stem,  # all ranks import it by this name
        connector_scheduler_class=PersistentKvCacheConnectorLeader.__name__,
        connector_worker_class=PersistentKvCacheConnectorWorker.__name__,
    )
    sampling = SamplingParams(max_tokens=32)
    outputs = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault(CACHE_FOLDER, folder)
        for title in ("First run", "Second run"):
            with LLM(
                options.model,
                connector=connector,
                tensor_parallel_size=options.tensor_parallel_size,
            ) as llm:  # leaving the block destroys the instance
                output = llm.generate(PROMPT, sampling)[0]
            print(f"{title}: {output.output_text!r}")
            print(
                f"  of {output.prompt_tokens} prompt tokens {output.reused_store_tokens} came from "
                f"files, {output.computed_tokens} were computed"
            )
            outputs.append(output)
    first, second = outputs
    if first.output_token_ids != second.output_token_ids:
        sys.exit("The answers differ.")
    if second.reused_store_tokens == 0:
        sys.exit("Nothing was reused.")
    print("The answers are the same.")


if __name__ == "__main__":
    main()
