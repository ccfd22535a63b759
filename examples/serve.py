"""A chat that survives a restart of its server, with OpenAI's own client.

Usage: ``python examples/serve.py [--model DIR] [--store URL] [--turns N]``

A server is started on a store; a client that knows nothing of kvconnect holds a conversation with
it. In the middle of the conversation the server is killed, as by a crash, and another one is
started. The client continues: the conversation's KV cache is loaded, and only new tokens are
computed. Needs ``pip install '.[serve]' openai``.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO = REPOSITORY / ".demo"
QUESTIONS = ("What may I do with it?", "And what must I not?", "Who is liable?", "Thank you.")


@dataclass(frozen=True)
class Turn:
    """The measurements of one answer."""

    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float


@contextmanager
def server(model: Path, store: str) -> Iterator[str]:
    """Runs a server, and kills it at the end; yields the base URL for clients."""
    arguments = ("--port", "0", "--served-model-name", "demo", "--lookup-timeout-ms", "1000")
    command = [
        sys.executable,
        "-P",
        "-m",
        "kvconnect",
        "serve",
        str(model),
        "--store",
        store,
        "--no-overlap-loads",  # the prompt's beginning shall be loaded, too, so that it counts
        *arguments,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = process.stdout.readline() if process.stdout is not None else ""
            if not said:
                sys.exit("FAILED: the server did not start")
            yield said.split()[-1]
        finally:
            process.kill()


def ask(client: OpenAI, messages: list[ChatCompletionMessageParam], max_tokens: int) -> Turn:
    """Asks for the next answer, and appends it to `messages`."""
    start = time.perf_counter()
    text = ""
    ttft: float | None = None
    usage: CompletionUsage | None = None
    for chunk in client.chat.completions.create(
        model="demo",
        messages=messages,
        max_completion_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.delta.content and ttft is None:
                ttft = time.perf_counter() - start
            text += choice.delta.content or ""
    messages.append({"role": "assistant", "content": text})
    if usage is None or usage.prompt_tokens_details is None:
        sys.exit("FAILED: the server did not count tokens")
    cached = usage.prompt_tokens_details.cached_tokens or 0
    return Turn(usage.prompt_tokens, cached, 1000 * (ttft or 0.0))


def wait_until_saved(base_url: str, prompt_tokens: int) -> None:
    """Waits until the store has the prompt's full blocks, as saves run behind the answers."""
    metrics = base_url.removesuffix("/v1") + "/metrics"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with urllib.request.urlopen(metrics) as answer:  # noqa: S310  a server of our own
            lines = answer.read().decode().splitlines()
        saved = [line for line in lines if line.startswith("kvconnect_store_blocks_total{")]
        if (
            sum(float(line.split()[-1]) for line in saved if '"save"' in line)
            >= prompt_tokens // 32
        ):
            return
        time.sleep(0.05)
    sys.exit("FAILED: the conversation was not saved")


def chat(model: Path, store: str, subject: str, turns: int, max_tokens: int) -> list[list[Turn]]:
    """Holds half of the conversation with each of two servers; returns the turns of each."""
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": subject}]
    questions = [QUESTIONS[number % len(QUESTIONS)] for number in range(turns)]
    halves = (questions[: turns // 2], questions[turns // 2 :])
    taken: list[list[Turn]] = []
    for name, half in zip(("first", "second"), halves, strict=True):
        print(f"The {name} server ...", flush=True)
        with server(model, store) as base_url, OpenAI(base_url=base_url, api_key="none") as client:
            taken.append([])
            for question in half:
                messages.append({"role": "user", "content": question})
                turn = ask(client, messages, max_tokens)
                taken[-1].append(turn)
                print(
                    f"  {question:24} {turn.prompt_tokens:>6,} prompt tokens, "
                    f"{turn.cached_tokens:>6,} of them cached; "
                    f"first token after {turn.ttft_ms:,.0f} ms",
                    flush=True,
                )
            wait_until_saved(base_url, taken[-1][-1].prompt_tokens if name == "first" else 0)
    return taken


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


def main() -> None:
    """Holds the conversation; fails if the second server computed what the first one had."""
    parser = argparse.ArgumentParser(description="A chat that survives a server's restart.")
    parser.add_argument("--model", type=Path, help="model directory (default: a random Llama)")
    parser.add_argument("--store", help="store URL (default: a new disk store in .demo/chats)")
    parser.add_argument("--subject", type=Path, help="text to talk about (default: LICENSE, cut)")
    parser.add_argument("--turns", type=int, default=4, help="questions, half to each server")
    parser.add_argument("--max-tokens", type=int, default=32, help="of each answer")
    arguments = parser.parse_args()
    model = arguments.model or demo_model()
    subject = (arguments.subject or REPOSITORY / "LICENSE").read_text(encoding="utf-8")[:3000]
    store = arguments.store or f"disk://{DEMO / 'chats'}?capacity=4GiB"
    if arguments.store is None:
        shutil.rmtree(DEMO / "chats", ignore_errors=True)  # each demonstration starts cold
    first, second = chat(model, store, subject, arguments.turns, arguments.max_tokens)
    before, after = first[-1], second[0]
    if after.cached_tokens < before.prompt_tokens // 32 * 32:
        sys.exit(
            f"FAILED: of {before.prompt_tokens} tokens that the first server had computed, the "
            f"second one found {after.cached_tokens}"
        )
    print(
        f"The second server found {after.cached_tokens:,} of {after.prompt_tokens:,} tokens in the "
        "store and computed the rest."
    )


if __name__ == "__main__":
    main()
