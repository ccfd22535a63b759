"""Measures the first token of prompts that `kvconnect warm --server` prepared, beside hits.

A hit is a prompt that the same server has answered before.
"""

from __future__ import annotations

import json
import os
import random
import re
import string
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from statistics import median

PROMPTS = 200
CHARACTERS = 500  # one token each
KVCONNECT = (sys.executable, "-P", "-m", "kvconnect")
SIZE = {"hidden-size": 256, "num-layers": 4, "intermediate-size": 512}


def texts(count: int, seed: int) -> list[str]:
    chosen = random.Random(seed)
    return ["".join(chosen.choices(string.ascii_lowercase, k=CHARACTERS)) for _ in range(count)]


def first_token_s(port: int, prompt: str) -> float:
    body = {"prompt": prompt, "max_tokens": 1, "stream": True}
    connection = HTTPConnection("127.0.0.1", port)
    started = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    answer.readline()
    took = time.perf_counter() - started
    answer.read()
    if answer.status != 200:
        raise RuntimeError(f"the server answers with status {answer.status}")
    connection.close()
    return took


def measure(port: int, folder: Path, environment: dict[str, str]) -> None:
    warmed, served = texts(PROMPTS, 1), texts(PROMPTS, 2)
    lines = folder / "prompts.jsonl"
    lines.write_text("".join(json.dumps(one) + "\n" for one in warmed))
    command = (*KVCONNECT, "warm", "--server", f"http://127.0.0.1:{port}", "--jsonl", lines)
    subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
    computed = median(first_token_s(port, one) for one in served)
    # In turn, so that what else the machine does slows both.
    pairs = [
        (first_token_s(port, one), first_token_s(port, other))
        for one, other in zip(warmed, served, strict=True)
    ]
    first, hit = (median(side) for side in zip(*pairs, strict=True))
    print(f"computed {1e3 * computed:.1f} ms, after warm {1e3 * first:.2f} ms, ", end="")
    print(f"hit {1e3 * hit:.2f} ms: {first / hit:.2f} of a hit")


def main() -> None:
    environment = os.environ | {"KVCONNECT_ADMIN_KEY": "admin"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = [word for option, value in SIZE.items() for word in (f"--{option}", str(value))]
        make = [*KVCONNECT, "make-model", str(folder / "model"), *size]
        subprocess.run(make, env=environment, check=True, stdout=subprocess.DEVNULL)
        store = f"disk:{folder}/kv?capacity=4GiB"
        command = (*KVCONNECT, "serve", folder / "model", "--port", "0", "--store", store)
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        ) as server:
            try:
                (port,) = re.findall(
                    r":(\d+)/v1", server.stdout.readline() if server.stdout else ""
                )
                measure(int(port), folder, environment)
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
