"""Prefill and decode servers behind a router, with OpenAI's own client.

Usage: ``python examples/disaggregated_serving.py [--model DIR] [--transport tcp|nixl]``

Starts a prefill server, a decode server and two routers. One router sends a prompt to both servers
in turn, the other to both at once, so that each layer is fetched while the next one is computed.
Fails if an answer differs from the prefill server's own, or a prompt was not transferred. Needs
``pip install '.[serve]' openai``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from demo_parts import REPOSITORY, demo_model, process
from openai import OpenAI

WAYS = {"without": ("--no-stream-layers",), "with": ()}


@dataclass(frozen=True)
class Answer:
    """An answer, with the prompt tokens that the server did not compute."""

    prompt_tokens: int
    transferred: int
    ttft_ms: float
    text: str


def ask(base_url: str, prompt: str, max_tokens: int) -> Answer:
    """Streams the answer to `prompt`, and measures it."""
    text, first, usage = "", None, None
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        client.models.list()  # connects, so that only the answer is measured
        began = time.perf_counter()
        for chunk in client.completions.create(
            model="demo",
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            # Without a salt, cached tokens are counted in whole blocks.
            extra_body={"ignore_eos": True, "cache_salt": "demo"},
        ):
            first = first or time.perf_counter()
            text += "".join(choice.text for choice in chunk.choices)
            usage = chunk.usage or usage
    if usage is None or usage.prompt_tokens_details is None or first is None:
        sys.exit("FAILED: the server did not count tokens")
    transferred = usage.prompt_tokens_details.cached_tokens or 0
    return Answer(usage.prompt_tokens, transferred, 1000 * (first - began), text)


def main() -> None:
    """Prints the table; fails if an answer differs or a prompt was not transferred."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model directory (default: a random Llama)")
    parser.add_argument("--transport", choices=("tcp", "nixl"), default="tcp")
    parser.add_argument("--tokens", type=int, default=2000, help="characters of each prompt")
    parser.add_argument("--prompts", type=int, default=4, help="for each way")
    parser.add_argument("--max-tokens", type=int, default=16, help="of each answer")
    given = parser.parse_args()
    model = str(given.model or demo_model())
    serve = ("serve", model, "--served-model-name", "demo", "--transport", given.transport)
    text = (REPOSITORY / "LICENSE").read_text(encoding="ascii") * (given.tokens // 8000 + 1)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    missing = differing = 0
    with ExitStack() as stack:
        print("Starting a prefill server, a decode server and two routers ...", flush=True)
        roles = ("prefill", "decode")
        servers = [stack.enter_context(process(*serve, "--role", role)) for role in roles]
        prefill, decode = (url() for url in servers)  # they start at the same time
        route = ("route", "--prefill", prefill, "--decode", decode)
        started = {way: stack.enter_context(process(*route, *WAYS[way])) for way in WAYS}
        routers = {way: url() for way, url in started.items()}
        for way, router in routers.items():
            ask(router, f"{way}: first request", 1)  # the router learns the prefill's address
        print(" streaming   tokens  transferred    first token  equal")
        for way, number in [(way, number) for number in range(given.prompts) for way in WAYS]:
            prompt = f"{way} {number} {text}"[: given.tokens]  # shares no prefix
            row = ask(routers[way], prompt, given.max_tokens)
            equal = row.text == ask(prefill, prompt, given.max_tokens).text
            counts = f"{row.prompt_tokens:>8,} {row.transferred:>12,} {row.ttft_ms:>11,.1f} ms"
            print(f"{way:>10} {counts} {'yes' if equal else 'NO':>6}", flush=True)
            times[way].append(row.ttft_ms)
            missing += row.transferred < row.prompt_tokens - 1
            differing += not equal
    for way, all_ms in times.items():
        median = statistics.median(all_ms)
        print(f"Median time to first token {way} streaming of layers: {median:,.1f} ms")
    if missing or differing:
        sys.exit(f"FAILED: {missing} prompts not transferred whole, {differing} answers differ")
    print("Every prompt was transferred, and every answer is that of one server.")


if __name__ == "__main__":
    main()
