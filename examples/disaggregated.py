"""Prefill in one process, decode in another: KV blocks move between their pools, peer to peer.

Usage: ``python examples/disaggregated.py [--model DIR] [--transport tcp|nixl] [--tokens N]``

Sends prompts like a router: to both in turn, then at the same time, so that layers are read while
others are computed. Fails if an answer differs from one engine's, or a prompt was not transferred.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvconnect import LLM, DecodeConnector, PrefillConnector, SamplingParams, TransferConfig
from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.transfer.local_secret import local_secret

ANSWER, PREFILL = SamplingParams(max_tokens=16, ignore_eos=True), SamplingParams(max_tokens=0)


@dataclass(frozen=True)
class Row:
    """The result of one prompt."""

    way: str
    prompt_tokens: int
    transferred: int
    ttft_ms: float
    equal: bool


def prefill_process(model: Path, transport: Literal["tcp", "nixl"], router: Connection) -> None:
    """Computes the prompts that the router sends, until ``None``; decode reads their blocks."""
    # Both processes prove by a secret, in a file of this user, that they are this user's.
    transfer = TransferConfig(role="prefill", transport=transport, secret=local_secret())
    connector = PrefillConnector(transfer=transfer)
    with LLM(model, connector=connector, max_num_tokens=512, dtype="float64") as llm:
        router.send(None)  # ready
        while (work := router.recv()) is not None:
            prompt, params = work
            (output,) = llm.generate([prompt], PREFILL, kv_transfer_params=params)
            router.send(output.kv_transfer_params)  # the decode engine needs these


def run(model: Path, transport: Literal["tcp", "nixl"], num_tokens: int, count: int) -> list[Row]:
    """Sends prompts both ways, and compares the answers with those of one engine."""
    context = multiprocessing.get_context("spawn")
    router, there = context.Pipe()
    process = context.Process(target=prefill_process, args=(model, transport, there))
    process.start()
    transfer = TransferConfig(role="decode", transport=transport, secret=local_secret())
    connector = DecodeConnector(transfer=transfer)
    random = np.random.default_rng(7)
    rows, address = [], ""
    try:
        with (
            LLM(model, dtype="float64") as alone,
            LLM(model, connector=connector, dtype="float64") as decode,
        ):
            router.recv()
            for way, number in [(way, n) for way in ("without", "with") for n in range(count)]:
                prompt = random.integers(1, 250, num_tokens).tolist()  # shares no prefix
                began = time.perf_counter()
                if way == "without":  # prefill first; its result says where the blocks are
                    router.send((prompt, {"do": "prefill"}))
                    carried: dict[str, Any] = router.recv()
                    address = carried["address"]
                else:  # both at once, under a name that the router chooses
                    name = f"prompt {number}"
                    router.send((prompt, {"do": "prefill", "transfer_id": name}))
                    carried = {"transfer_id": name, "address": address}
                handle = decode.submit(prompt, ANSWER, kv_transfer_params=carried)
                next(iter(handle.stream()))
                ttft_ms = 1000 * (time.perf_counter() - began)
                output = handle.result()
                if way == "with":
                    router.recv()
                (expected,) = alone.generate([prompt], ANSWER)
                equal = output.output_token_ids == expected.output_token_ids
                rows.append(Row(way, len(prompt), output.reused_store_tokens, ttft_ms, equal))
            router.send(None)
    finally:
        process.join(30)
        process.kill()
    return rows


def main() -> int:
    """Prints the table; returns 0 if all prompts were transferred and all answers are equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="directory of a model; default: a random one")
    parser.add_argument("--transport", choices=("tcp", "nixl"), default="tcp")
    parser.add_argument("--tokens", type=int, default=1024, help="of each prompt")
    parser.add_argument("--prompts", type=int, default=4, help="for each way")
    given = parser.parse_args()
    if given.model is None:
        print("The model is random: its answers make no sense.")
    with tempfile.TemporaryDirectory() as scratch:
        longest = {"max_position_embeddings": given.tokens + 64}
        model = given.model or make_model(Path(scratch) / "model", "llama", **longest)
        rows = run(model, given.transport, given.tokens, given.prompts)
    print(f"{'streaming':>10} {'tokens':>8} {'transferred':>12} {'first token':>12} {'equal':>6}")
    for row in rows:
        times = f"{row.ttft_ms:>9.1f} ms {'yes' if row.equal else 'NO':>6}"
        print(f"{row.way:>10} {row.prompt_tokens:>8} {row.transferred:>12} {times}")
    return 0 if all(row.equal and row.transferred == row.prompt_tokens - 1 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
