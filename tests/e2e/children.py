"""What child processes run. A module of its own, since they import it by name."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from harness import PARAMS, PROMPT, open_llm


def serve(model: Path, store: str, ready: Connection) -> None:
    """A child process: answers prompts, each saved as it goes, until it is killed."""
    with open_llm(model, store) as llm:
        ready.send(None)
        for start in range(10_000):
            llm.generate([[*PROMPT[start % 50 :], start % 250]], PARAMS)


def answer_twice(model: Path, store: str, result: Connection) -> None:
    """A child process: answers the prompt, from the store and from the device."""
    with open_llm(model, store) as llm:
        result.send([llm.generate([PROMPT], PARAMS)[0].output_token_ids for _ in range(2)])
