"""A persistent KV cache by subclassing the connector API: a safetensors file per block.

Usage: ``python examples/kv_connector.py MODEL_DIR``

It answers a prompt, destroys the engine, makes a new one with the same connector and answers again:
the blocks come from the files and the answer is the same.

The leader names each block's file by the block's chained key, which stands for the whole prefix,
the model, the cache's geometry and the tenant's salt. The worker copies blocks between the pool and
the files. A file that is missing, damaged or of another block is a failed load: the runtime then
computes those tokens, and the file is written again.

To keep it short, loads and saves run inside the engine's step, only whole blocks are stored, and
nothing bounds the folder. `kvconnect.connector.offload.worker` does all that.
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


@dataclass(frozen=True)
class BlockFile:
    """One block on its way: its file, its id, whose it is, and the token it begins with."""

    file: str
    block_id: int
    request_id: int
    first_token: int


@dataclass
class PersistentKvCacheConnectorMetadata:
    """What the workers are to do in one step."""

    load: list[BlockFile] = field(default_factory=list)
    save: list[BlockFile] = field(default_factory=list)


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
        self._folder = Path(os.environ.get(CACHE_FOLDER, "connector_cache"))
        self._folder.mkdir(parents=True, exist_ok=True)
        self._matches: dict[int, range] = {}  # blocks that were matched and not yet loaded
        self._progress: dict[int, Progress] = {}

    def get_num_new_matched_tokens(
        self, request: LlmRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Count the full blocks that follow and have a file; the last token is always computed."""
        first = num_computed_tokens // self._tokens_per_block
        end = first
        for key in request.block_keys(first, (request.num_tokens - 1) // self._tokens_per_block):
            if not self._file(key).exists():
                break
            end += 1
        self._matches[request.request_id] = range(first, end)
        return (end - first) * self._tokens_per_block, False

    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Load nothing of an offer that was not taken; the step's report names the blocks."""
        if not request.num_connector_matched_tokens:
            self._matches.pop(request.request_id, None)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object:
        """Load what was matched; save every block that this step fills."""
        metadata = PersistentKvCacheConnectorMetadata()
        for data in scheduler_output.new_requests:
            self._progress[data.request_id] = Progress()
            metadata.load += self._loads(data)
        for data in scheduler_output.new_requests + scheduler_output.cached_requests:
            metadata.save += self._saves(data)
        return metadata

    def _loads(self, data: RequestData) -> list[BlockFile]:
        blocks = self._matches.pop(data.request_id, range(0))
        self._progress[data.request_id].num_saved = blocks.stop
        return [self._block_file(data, index, data.new_block_ids[index]) for index in blocks]

    def _saves(self, data: RequestData) -> list[BlockFile]:
        progress = self._progress[data.request_id]
        progress.block_ids += data.new_block_ids
        start = max(data.computed_position, progress.num_saved * self._tokens_per_block)
        num_full = (start + data.num_scheduled_tokens) // self._tokens_per_block
        filled = range(progress.num_saved, min(num_full, len(data.block_keys)))
        progress.num_saved = max(progress.num_saved, filled.stop)
        files = [self._block_file(data, index, progress.block_ids[index]) for index in filled]
        return [one for one in files if not Path(one.file).exists()]

    def load_failed(self, request: LlmRequest, num_valid_tokens: int) -> None:
        """Blocks from there on are computed, so they can be saved again."""
        progress = self._progress.get(request.request_id)
        if progress is not None:
            valid = num_valid_tokens // self._tokens_per_block
            progress.num_saved = min(progress.num_saved, valid)

    def request_reset(self, request: LlmRequest) -> None:
        """It lost its blocks."""
        self._forget(request)

    def request_finished(self, request: LlmRequest, cache_block_ids: list[int]) -> bool:
        """All saves are over at the end of their step: no block needs to be kept."""
        self._forget(request)
        return False

    def _forget(self, request: LlmRequest) -> None:
        self._matches.pop(request.request_id, None)
        self._progress.pop(request.request_id, None)

    def _block_file(self, data: RequestData, index: int, block_id: int) -> BlockFile:
        file = str(self._file(data.block_keys[index]))
        return BlockFile(file, block_id, data.request_id, index * self._tokens_per_block)

    def _file(self, key: BlockKey) -> Path:
        return self._folder / f"{key.hex()}.safetensors"


class PersistentKvCacheConnectorWorker(KvCacheConnectorWorker):
    """Copies blocks from files to the pool, and back."""

    def __init__(self, llm_args: LlmArgs) -> None:
        super().__init__(llm_args)
        self._failed: dict[int, TransferFailure] = {}

    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        """Keep the pool, ``[num_blocks, num_layers, kv_factor, elements]``."""
        self._pool = kv_cache_tensor

    def start_load_kv(self, stream: ForwardStream) -> None:
        """Read the step's files into the pool; a request's first bad file ends its load."""
        for one in self._step().load:
            if one.request_id in self._failed:
                continue
            try:
                block = _read_block(Path(one.file), self._pool[one.block_id])
            except (OSError, ValueError, SafetensorError) as error:
                print(f"cannot load {one.file}: {error}", file=sys.stderr)
                Path(one.file).unlink(missing_ok=True)
                self._failed[one.request_id] = TransferFailure(
                    one.request_id, Direction.LOAD, one.first_token, str(error)
                )
            else:
                self._pool[one.block_id].copy_(block)

    def wait_for_layer_load(self, layer_idx: int, stream: ForwardStream) -> None:
        """Everything was loaded in `start_load_kv`."""

    def save_kv_layer(self, layer_idx: int, stream: ForwardStream) -> None:
        """Whole blocks are saved in `wait_for_save`."""

    def wait_for_save(self, stream: ForwardStream) -> None:
        """Write the blocks that this step filled, but nothing computed behind a failed load."""
        for one in self._step().save:
            if one.request_id in self._failed:
                continue
            try:
                _write_block(Path(one.file), self._pool[one.block_id].cpu())
            except OSError as error:
                print(f"cannot save {one.file}: {error}", file=sys.stderr)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Nothing runs in the background."""
        return [], []

    def get_failed(self) -> list[TransferFailure]:
        """The loads of this step that met a bad file."""
        failed, self._failed = list(self._failed.values()), {}
        return failed

    def _step(self) -> PersistentKvCacheConnectorMetadata:
        metadata = self.get_connector_meta()
        if not isinstance(metadata, PersistentKvCacheConnectorMetadata):
            return PersistentKvCacheConnectorMetadata()
        return metadata


def _digest(file: Path, block: Tensor) -> Tensor:
    # Covers the name, so that a sound file under another block's name is found out, too.
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
    """Write under a temporary name, then rename: a file is whole or not there."""
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
    model = parser.parse_args().model
    connector = KvCacheConnectorConfig(
        connector_module=__name__,
        connector_scheduler_class=PersistentKvCacheConnectorLeader.__name__,
        connector_worker_class=PersistentKvCacheConnectorWorker.__name__,
    )
    sampling = SamplingParams(max_tokens=32)
    outputs = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault(CACHE_FOLDER, folder)
        for title in ("First run", "Second run"):
            with LLM(model, connector=connector) as llm:  # leaving the block destroys the instance
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
