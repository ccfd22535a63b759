"""A chat that survives a restart of its server, with OpenAI's own client.

Usage: ``python examples/serve.py [--model DIR] [--store URL] [--turns N]``

Half way the server is killed, and another one is started on the same store: it loads the KV cache
of the conversation, and computes only new tokens. Needs ``pip install '.[serve]' openai``.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
import urllib.request
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from demo_parts import DEMO, REPOSITORY, Url, demo_model, process
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

QUESTIONS = ("What may I do with it?", "And what must I not?", "Who is liable?", "Thank you.")


@dataclass(frozen=True)
class Turn:
    """The measurements of one answer."""

    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float


def server(model: Path, store: str) -> AbstractContextManager[Url]:
    """Runs a server until the context ends, then kills it; yields the base URL for clients."""
    # Without the overlap the beginning of a prompt is loaded, too, so that it counts.
    options = ("--served-model-name", "demo", "--no-overlap-loads", "--lookup-timeout-ms", "1000")
    return process("serve", str(model), "--store", store, *options, crash=True)


def ask(client: OpenAI, messages: list[ChatCompletionMessageParam]) -> Turn:
    """Asks for the next answer, and appends it to `messages`."""
    start = time.perf_counter()
    text, first, usage = "", None, None
    for chunk in client.chat.completions.create(
        model="demo",
        messages=messages,
        max_completion_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        first = first or (time.perf_counter() if text else None)
    messages.append({"role": "assistant", "content": text})
    if usage is None or usage.prompt_tokens_details is None:
        sys.exit("FAILED: the server did not count tokens")
    cached = usage.prompt_tokens_details.cached_tokens or 0
    return Turn(usage.prompt_tokens, cached, 1000 * ((first or start) - start))


def wait_until_saved(base_url: str, prompt_tokens: int) -> None:
    """Waits until the store has the prompt's full blocks, as saves run behind the answers."""
    metrics = base_url.removesuffix("/v1") + "/metrics"
    for _ in range(1200):
        with urllib.request.urlopen(metrics) as answer:  # noqa: S310  a server of our own
            counts = re.findall(r'store_blocks_total\{.*"save".*\} (\S+)', answer.read().decode())
        if sum(map(float, counts)) >= prompt_tokens // 32:  # 32 tokens are a block
            return
        time.sleep(0.05)
    sys.exit("FAILED: the conversation was not saved")


def chat(model: Path, store: str, subject: str, turns: int) -> list[list[Turn]]:
    """Holds half of the conversation with each of two servers; returns the turns of each."""
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": subject}]
    questions = [QUESTIONS[number % len(QUESTIONS)] for number in range(turns)]
    taken: list[list[Turn]] = []
    for name, half in (("first", questions[: turns // 2]), ("second", questions[turns // 2 :])):
        print(f"The {name} server ...", flush=True)
        with server(model, store) as url, OpenAI(base_url=url(), api_key="none") as client:
            taken.append([])
            for question in half:
                messages.append({"role": "user", "content": question})
                taken[-1].append(turn := ask(client, messages))
                counts = f"{turn.prompt_tokens:>6,} prompt tokens, {turn.cached_tokens:>6,} of them"
                times = f"first token after {turn.ttft_ms:,.0f} ms"
                print(f"  {question:24} {counts} cached; {times}", flush=True)
            wait_until_saved(url(), taken[-1][-1].prompt_tokens if name == "first" else 0)
    return taken


def main() -> None:
    """Holds the conversation; fails if the second server computed what the first one had."""
    parser = argparse.ArgumentParser(description="A chat that survives a server's restart.")
    parser.add_argument("--model", type=Path, help="model directory (default: a random Llama)")
    parser.add_argument("--store", help="store URL (default: a new disk store in .demo/chats)")
    parser.add_argument("--subject", type=Path, help="text to talk about (default: LICENSE, cut)")
    parser.add_argument("--turns", type=int, default=4, help="questions, half to each server")
    arguments = parser.parse_args()
    model = arguments.model or demo_model()
    subject = (arguments.subject or REPOSITORY / "LICENSE").read_text(encoding="utf-8")[:3000]
    store = arguments.store or f"disk://{DEMO / 'chats'}?capacity=4GiB"
    if arguments.store is None:
        shutil.rmtree(DEMO / "chats", ignore_errors=True)  # each demonstration starts cold
    [*_, before], [after, *_] = chat(model, store, subject, arguments.turns)
    if after.cached_tokens < before.prompt_tokens // 32 * 32:
        computed = f"of {before.prompt_tokens} tokens that the first server had computed"
        sys.exit(f"FAILED: {computed}, the second one found {after.cached_tokens}")
    found = f"{after.cached_tokens:,} of {after.prompt_tokens:,} tokens"
    print(f"The second server found {found} in the store and computed the rest.")


if __name__ == "__main__":
    main()
