"""Prefill and decode servers behind a router, with OpenAI's own client.

Usage: ``python examples/disaggregated_serving.py [--model DIR] [--transport tcp|nixl]``

Starts a prefill server, a decode server and two routers as processes of their own: one router sends
a prompt to the one and then to the other, the other router to both at once, so that each layer is
fetched while the next one is computed. A client that knows nothing of this asks both routers, and
the prefill server alone. Prints what each answer took, and fails if one differs from that of the
one server, or a prompt was not transferred. Needs ``pip install '.[serve]' openai``.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO = REPOSITORY / ".demo"
WAYS = {"without": ("--no-stream-layers",), "with": ()}


@dataclass(frozen=True)
class Row:
    """The measurements of one answer.

    Attributes:
        way: with or without streaming of layers.
        prompt_tokens: of the prompt.
        transferred: prompt tokens that the decode server did not compute.
        ttft_ms: time to first token.
        text: of the answer.
    """

    way: str
    prompt_tokens: int
    transferred: int
    ttft_ms: float
    text: str


@contextmanager
def process(*arguments: str) -> Iterator[str]:
    """Runs a ``kvconnect`` process, and yields its base URL; exits if the process fails."""
    command = [sys.executable, "-P", "-m", "kvconnect", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            said = running.stdout.readline() if running.stdout is not None else ""
            if not said:
                sys.exit(f"FAILED: kvconnect {arguments[0]} did not start")
            yield said.split()[-1]
            running.send_signal(signal.SIGTERM)
            if running.wait(60) != 0:
                sys.exit(f"FAILED: kvconnect {arguments[0]} ended with {running.returncode}")
        finally:
            running.kill()


def prompts(count: int, num_tokens: int) -> list[str]:
    """Makes texts that share no prefix, with one byte for each token."""
    text = (REPOSITORY / "LICENSE").read_text(encoding="ascii") * (num_tokens // 8000 + 1)
    return [f"{number} {text}"[:num_tokens] for number in range(count)]


def ask(base_url: str, prompt: str, way: str, max_tokens: int) -> Row:
    """Streams the answer to `prompt`, and measures it."""
    text, first, usage = "", None, None
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        client.models.list()  # connected: what follows is the answer's own time
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
    return Row(way, usage.prompt_tokens, transferred, 1000 * (first - began), text)


def run(
    model: Path, transport: str, texts: Sequence[str], max_tokens: int
) -> tuple[list[Row], int]:
    """Asks for each of `texts` both ways; returns the rows, and how many answers differ."""
    serve = ("serve", str(model), "--served-model-name", "demo", "--transport", transport)
    rows, differing = [], 0
    with ExitStack() as stack:
        print("Starting a prefill server, a decode server and two routers ...", flush=True)
        prefill = stack.enter_context(process(*serve, "--role", "prefill"))
        decode = stack.enter_context(process(*serve, "--role", "decode"))
        servers = ("--prefill", prefill, "--decode", decode)
        routers = {
            way: stack.enter_context(process("route", *servers, *options))
            for way, options in WAYS.items()
        }
        for way, router in routers.items():
            # From its first answer a router knows where decode servers reach the prefill server.
            ask(router, f"{way}: are you there?", way, 1)
        print(
            f"{'streaming':>10} {'tokens':>8} {'transferred':>12} {'first token':>14} {'equal':>6}"
        )
        for text in texts:
            for way, router in routers.items():
                row = ask(router, f"{way} {text}", way, max_tokens)
                alone = ask(prefill, f"{way} {text}", "alone", max_tokens)
                equal = row.text == alone.text
                rows.append(row)
                differing += not equal
                print(
                    f"{way:>10} {row.prompt_tokens:>8,} {row.transferred:>12,} "
                    f"{row.ttft_ms:>11,.1f} ms {'yes' if equal else 'NO':>6}",
                    flush=True,
                )
    return rows, differing


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
    """Prints the table; fails if an answer differs or a prompt was not transferred."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model directory (default: a random Llama)")
    parser.add_argument("--transport", choices=("tcp", "nixl"), default="tcp")
    parser.add_argument("--tokens", type=int, default=2000, help="characters of each prompt")
    parser.add_argument("--prompts", type=int, default=4, help="for each way")
    parser.add_argument("--max-tokens", type=int, default=16, help="of each answer")
    given = parser.parse_args()
    model = given.model or demo_model()
    texts = prompts(given.prompts, given.tokens)
    rows, differing = run(model, given.transport, texts, given.max_tokens)
    for way in WAYS:
        median = statistics.median(row.ttft_ms for row in rows if row.way == way)
        print(f"Median time to first token {way} streaming of layers: {median:,.1f} ms")
    missing = sum(row.transferred < row.prompt_tokens - 1 for row in rows)
    if missing or differing:
        sys.exit(
            f"FAILED: {missing} prompts were not transferred whole, {differing} answers differ "
            "from those of one server"
        )
    print("Every prompt was transferred, and every answer is that of one server.")


if __name__ == "__main__":
    main()
