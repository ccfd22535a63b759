"""A prompt cache that survives a restart: two processes, one after the other, on one store.

Usage: ``python examples/persistent_prompt_cache.py [--model DIR] [--prompt FILE] [--store URL]``

The first process computes the prompt and leaves its KV cache in the store. The second one loads it
and computes the last token only. The script compares both answers, prints what each took, and fails
if the answers differ or nothing was reused. ``make demo`` runs it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kvconnect import LLM, ConfigurationError, KvCacheConnectorConfig, SamplingParams
from kvconnect.backends.url import StoreUrl, format_size

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO = REPOSITORY / ".demo"


@dataclass(frozen=True)
class Run:
    """The measurements of one process; times are in milliseconds."""

    prompt_tokens: int
    reused_store_tokens: int
    computed_tokens: int
    ttft_ms: float
    output_token_ids: list[int]
    output_text: str


def answer(model: Path, prompt: str, store: str, max_tokens: int) -> Run:
    """Answers `prompt` with a new engine. On return the KV cache is in `store`."""
    sampling = SamplingParams(max_tokens=max_tokens)
    # No other request waits here, so a lookup may take longer than under load. By default the
    # beginning of a prompt is computed while its end is loaded; here all of it shall be loaded.
    connector = KvCacheConnectorConfig(url=store, lookup_timeout_ms=10_000, overlap_loads=False)
    with LLM(model, connector=connector) as llm:
        output = llm.generate(prompt, sampling)[0]
    return Run(
        output.prompt_tokens,
        output.reused_store_tokens,
        output.computed_tokens,
        output.ttft_ms or 0.0,
        list(output.output_token_ids),
        output.output_text,
    )


def answer_in_new_process(model: Path, prompt_file: Path, store: str, max_tokens: int) -> Run:
    """Calls `answer` in a process of its own, so that only the store remains of it.

    Raises:
        subprocess.CalledProcessError: the process failed; its message is on standard error.
    """
    arguments = ("--model", model, "--prompt", prompt_file, "--store", store)
    command = [
        sys.executable,
        __file__,
        "--once",
        *map(str, arguments),
        f"--max-tokens={max_tokens}",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Run(**json.loads(done.stdout))


def demo_model() -> Path:
    """Returns a random Llama of 46 million parameters; makes it the first time."""
    print("The model is random: its answers make no sense, its work is that of a real one.")
    model = DEMO / "model"
    if not model.exists():
        from kvconnect.engine.checkpoint.random_model import make_model

        print("Making a random Llama of 46 million parameters in .demo/model ...", flush=True)
        unfinished = DEMO / "model.unfinished"
        make_model(unfinished, "llama", preset="demo")
        unfinished.rename(model)
    return model


def demo_prompt() -> Path:
    """Writes the first 6,000 characters of the licence, which take a while on two cores."""
    DEMO.mkdir(exist_ok=True)
    prompt = DEMO / "prompt.txt"
    prompt.write_text((REPOSITORY / "LICENSE").read_text(encoding="utf-8")[:6000], encoding="utf-8")
    return prompt


def near_tie(model: Path, prompt: str, first: list[int], second: list[int]) -> float | None:
    """Returns by how much the model prefers one answer's token to the other's where they part.

    The result is a share of the largest logit. It is ``None`` if either token is not one of the
    model's two best. Sums in another order differ in their last bits, so answers of float32 and
    bfloat16 models may part at a tie.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    same = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    tokens = AutoTokenizer.from_pretrained(model).encode(prompt) + first[:same]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1].double()
    best = logits.topk(2)
    if {first[same], second[same]} != set(best.indices.tolist()):
        return None
    return float((best.values[0] - best.values[1]) / logits.abs().max())


def bytes_on_disk(store: str) -> int | None:
    """Returns the bytes that the files of a ``disk:`` store take; ``None`` for other stores."""
    url = StoreUrl.parse(store)
    if url.scheme != "disk":
        return None
    return sum(file.stat().st_blocks * 512 for file in Path(url.path).rglob("*") if file.is_file())


def print_table(first: Run, second: Run, store: str) -> None:
    """Prints the two runs side by side."""
    rows = (
        ("prompt tokens", first.prompt_tokens, second.prompt_tokens, "{:,}"),
        ("reused from the store", first.reused_store_tokens, second.reused_store_tokens, "{:,}"),
        ("computed", first.computed_tokens, second.computed_tokens, "{:,}"),
        ("time to first token (ms)", first.ttft_ms, second.ttft_ms, "{:,.1f}"),
    )
    print(f"\n{'':26}{'first process':>16}{'second process':>16}")
    for name, left, right, form in rows:
        print(f"{name:26}{form.format(left):>16}{form.format(right):>16}")
    print(f"\nspeed-up of the first token: {first.ttft_ms / max(second.ttft_ms, 1e-3):.1f}x")
    nbytes = bytes_on_disk(store)
    if nbytes is not None:
        print(f"cache on disk: {format_size(nbytes)} of files, room for more included")


def verdict(model: Path, prompt: str, first: Run, second: Run) -> str | None:
    """Returns what is wrong with the two runs, or ``None``."""
    if second.reused_store_tokens == 0:
        return "the second process reused nothing"
    if first.output_token_ids == second.output_token_ids:
        print(f"Both answered with the same {len(first.output_token_ids)} tokens.")
        return None
    share = near_tie(model, prompt, first.output_token_ids, second.output_token_ids)
    if share is None or share > 1e-2:
        return "the answers differ"
    print(
        f"The answers part at a near-tie: the two tokens' logits differ by {share:.1e} of the "
        "largest one. That is rounding; float64 models give the same tokens."
    )
    return None


def main() -> None:
    """Runs the demonstration, or with ``--once`` one of its two processes."""
    parser = argparse.ArgumentParser(description="A prompt cache that survives a restart.")
    parser.add_argument("--model", type=Path, help="model directory (default: a random Llama)")
    parser.add_argument("--prompt", type=Path, help="text file (default: LICENSE, cut)")
    parser.add_argument("--store", help="store URL (default: a new disk store in .demo/store)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens to generate")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = arguments.model or demo_model()
    prompt_file = arguments.prompt or demo_prompt()
    if not prompt_file.is_file():
        parser.error(f"--prompt: '{prompt_file}' is not a file")
    prompt = prompt_file.read_text(encoding="utf-8")
    store = arguments.store or f"disk://{DEMO / 'store'}?capacity=4GiB"
    if arguments.once:
        try:
            print(json.dumps(asdict(answer(model, prompt, store, arguments.max_tokens))))
        except ConfigurationError as error:
            sys.exit(f"error: {error}")
        return
    if arguments.store is None:
        shutil.rmtree(DEMO / "store", ignore_errors=True)  # each demonstration starts cold
    runs = []
    for which in ("first", "second"):
        print(f"{which.capitalize()} process ...", flush=True)
        try:
            runs.append(answer_in_new_process(model, prompt_file, store, arguments.max_tokens))
        except subprocess.CalledProcessError as error:
            sys.exit(f"FAILED: the {which} process ended with exit code {error.returncode}")
    first, second = runs
    print_table(first, second, store)
    if first.reused_store_tokens:
        print("The store had this prompt from an earlier run: the first process reused it, too.")
    problem = verdict(model, prompt, first, second)
    if problem is not None:
        sys.exit(f"FAILED: {problem}")


if __name__ == "__main__":
    main()
