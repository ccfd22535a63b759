"""The parts that other examples share: a random model, a command's process, ties of logits."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeAlias

from kvconnect.engine.checkpoint.random_model import make_model

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO = REPOSITORY / ".demo"

Url: TypeAlias = Callable[[], str]
"""Waits until a server listens, and returns its base URL."""


def demo_model() -> Path:
    """Returns a random Llama of 46 million parameters; makes it the first time."""
    print("The model is random: its answers make no sense, its work is that of a real one.")
    model = DEMO / "model"
    if not model.exists():
        print("Making a random Llama of 46 million parameters in .demo/model ...", flush=True)
        unfinished = DEMO / "model.unfinished"
        make_model(unfinished, "llama", preset="demo")
        unfinished.rename(model)
    return model


@contextmanager
def process(*arguments: str, crash: bool = False) -> Iterator[Url]:
    """Runs the command ``kvconnect``, and yields a function that waits for its base URL.

    Exits if the command fails. Leaving the context ends the process by SIGTERM, or with `crash` by
    SIGKILL.
    """
    command = [sys.executable, "-P", "-m", "kvconnect", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:

        @cache
        def url() -> str:
            printed = running.stdout.readline() if running.stdout is not None else ""
            if not printed:
                sys.exit(f"FAILED: kvconnect {arguments[0]} did not start")
            return printed.split()[-1]

        try:
            yield url
            if not crash:
                running.send_signal(signal.SIGTERM)
                if running.wait(60) != 0:
                    sys.exit(f"FAILED: kvconnect {arguments[0]} ended with {running.returncode}")
        finally:
            running.kill()


def near_tie(model: Path, prompt: str, first: list[int], second: list[int]) -> float | None:
    """Returns by how much the model prefers one answer's token to the other's where they part.

    The result is a share of the largest logit. It is ``None`` if either token is not one of the
    model's two best. Sums in another order differ in their last bits, so answers of float32 and
    bfloat16 models may part at a tie.
    """
    import torch
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
