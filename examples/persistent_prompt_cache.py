"""A prompt cache that survives a restart: two processes, one after the other, on one store.

Usage: ``python examples/persistent_prompt_cache.py [--model DIR] [--prompt FILE] [--store URL]``

The first process computes the prompt and saves its KV cache. The second one loads it, and computes
only the last token. The script fails if the answers differ, or no token was reused.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from demo_parts import DEMO, REPOSITORY, demo_model, near_tie

from kvconnect import LLM, ConfigurationError, KvCacheConnectorConfig, SamplingParams
from kvconnect.backends.url import StoreUrl, format_size


@dataclass(frozen=True)
class Run:
    """The measurements of one process; times are in milliseconds."""

    prompt_tokens: int
    reused_store_tokens: int
    computed_tokens: int
    ttft_ms: float
    output_token_ids: list[int]


def answer(model: Path, prompt: str, store: str, max_tokens: int) -> Run:
    """Answers `prompt` with a new engine. On return the KV cache is in `store`."""
    # Without the overlap the whole prompt is loaded. No other request waits for the lookup.
    connector = KvCacheConnectorConfig(url=store, lookup_timeout_ms=10_000, overlap_loads=False)
    with LLM(model, connector=connector) as llm:
        output = llm.generate(prompt, SamplingParams(max_tokens=max_tokens))[0]
    counts = (output.prompt_tokens, output.reused_store_tokens, output.computed_tokens)
    return Run(*counts, output.ttft_ms or 0.0, list(output.output_token_ids))


def answer_in_new_process(model: Path, prompt_file: Path, store: str, max_tokens: int) -> Run:
    """Calls `answer` in a process of its own, so that only the store remains of it."""
    given = ("--model", model, "--prompt", prompt_file, "--store", store)
    command = [sys.executable, __file__, "--once", *map(str, given), f"--max-tokens={max_tokens}"]
    print("A new process ...", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"FAILED: the process ended with exit code {done.returncode}")
    return Run(**json.loads(done.stdout))


def print_table(first: Run, second: Run, store: str) -> None:
    """Prints the two runs side by side, and the size of a ``disk:`` store."""
    print(f"\n{'':26}{'first process':>16}{'second process':>16}")
    for name, field, form in (
        ("prompt tokens", "prompt_tokens", "{:,}"),
        ("reused from the store", "reused_store_tokens", "{:,}"),
        ("computed", "computed_tokens", "{:,}"),
        ("time to first token (ms)", "ttft_ms", "{:,.1f}"),
    ):
        left, right = (form.format(getattr(run, field)) for run in (first, second))
        print(f"{name:26}{left:>16}{right:>16}")
    print(f"\nspeed-up of the first token: {first.ttft_ms / max(second.ttft_ms, 1e-3):.1f}x")
    if (url := StoreUrl.parse(store)).scheme == "disk":
        nbytes = sum(512 * file.stat().st_blocks for file in Path(url.path).rglob("*"))
        print(f"cache on disk: {format_size(nbytes)} of files, free slots included")


def verdict(model: Path, prompt: str, first: Run, second: Run) -> str | None:
    """Returns the reason why the demonstration failed, or ``None``."""
    if second.reused_store_tokens == 0:
        return "the second process reused nothing"
    if first.output_token_ids == second.output_token_ids:
        print(f"Both answered with the same {len(first.output_token_ids)} tokens.")
        return None
    share = near_tie(model, prompt, first.output_token_ids, second.output_token_ids)
    if share is None or share > 1e-2:
        return "the answers differ"
    print(f"The answers part at a near-tie: two logits differ by {share:.1e} of the largest one.")
    return None


def main() -> None:
    """Runs the demonstration, or with ``--once`` one of its two processes."""
    parser = argparse.ArgumentParser(description="A prompt cache that survives a restart.")
    parser.add_argument("--model", type=Path, help="model directory (default: a random Llama)")
    parser.add_argument("--prompt", type=Path, default=REPOSITORY / "LICENSE", help="text file")
    parser.add_argument("--store", help="store URL (default: a new disk store in .demo/store)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens to generate")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.prompt.is_file():
        parser.error(f"--prompt: '{given.prompt}' is not a file")
    prompt = given.prompt.read_text(encoding="utf-8")
    if given.prompt == REPOSITORY / "LICENSE":
        prompt = prompt[:6000]  # takes a while on two cores
    model = given.model or demo_model()
    store = given.store or f"disk://{DEMO / 'store'}?capacity=4GiB"
    if given.once:
        try:
            print(json.dumps(asdict(answer(model, prompt, store, given.max_tokens))))
        except ConfigurationError as error:
            sys.exit(f"error: {error}")
        return
    if given.store is None:
        shutil.rmtree(DEMO / "store", ignore_errors=True)  # each demonstration starts cold
    runs = [answer_in_new_process(model, given.prompt, store, given.max_tokens) for _ in range(2)]
    print_table(runs[0], runs[1], store)
    if (problem := verdict(model, prompt, *runs)) is not None:
        sys.exit(f"FAILED: {problem}")


if __name__ == "__main__":
    main()
