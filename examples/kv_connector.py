"""A persistent KV cache by subclassing the connector API: a safetensors file per block and rank.

Usage: ``python examples/kv_connector.py MODEL_DIR [--tensor-parallel-size N]``

It answers a prompt, destroys the engine, makes a new one with the same connector and answers again:
the blocks come from the files and the answer is the same.

The two halves are `kv_connector_leader.py` and `kv_connector_worker.py`, over `block_files.py`.

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
from pathlib import Path

from block_files import CACHE_FOLDER
from kv_connector_leader import PersistentKvCacheConnectorLeader
from kv_connector_worker import PersistentKvCacheConnectorWorker

from kvconnect import LLM, KvCacheConnectorConfig, SamplingParams

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
