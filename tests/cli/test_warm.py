"""warm: what a store lacks of prompts is computed and saved, and nothing else is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from stored_blocks import entries

from kvconnect import LLM, ConfigurationError, PromptStore
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.engine.generation import Generation
from kvconnect.operations import warm

TEXT = "a prompt that is longer than a block. " * 4  # 152 tokens
PROMPT = list(range(100, 164))  # two blocks, and no more


@pytest.fixture
def submitted(monkeypatch) -> list[int]:
    """The lengths of the prompts that engines are given."""
    found = []
    plain = Generation.submit

    def submit(self, prompt, *rest, **named):
        found.append(len(prompt["prompt_token_ids"]))
        return plain(self, prompt, *rest, **named)

    monkeypatch.setattr(Generation, "submit", submit)
    return found


def test_an_engine_loads_what_was_warmed_and_a_repeated_warm_computes_nothing(
    kvconnect, url, model, tmp_path, submitted
):
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(json.dumps(TEXT) + "\n" + json.dumps(PROMPT))
    code, out, err = kvconnect("warm", url, model, "--jsonl", lines)
    assert code == 0, err
    nbytes = sum(entry.nbytes for entry in entries(url).values())
    assert out.startswith(f"saved 7 blocks, {nbytes // 1024} KiB, 215 tokens; 1 tokens of the")
    assert out.endswith("; 0 were there already\n")
    assert submitted == [152, 64]
    with LLM(
        model, connector={"url": url, "lookup_timeout_ms": 60_000, "overlap_loads": False}
    ) as llm:
        outputs = llm.generate([TEXT, PROMPT], {"max_tokens": 1})
    assert [one.reused_store_tokens for one in outputs] == [151, 63]
    del submitted[:]
    lines.write_text(json.dumps(TEXT) + "\n" + json.dumps([*PROMPT, *PROMPT]))
    found = json.loads(kvconnect("warm", url, model, "--jsonl", lines, "--json")[1])
    assert (found["blocks"], found["present"], found["complete"]) == (2, 7, True)
    assert submitted == [128]


def test_blocks_of_another_geometry_are_not_taken_for_stored(kvconnect, url, model):
    prompt = ("--prompt", TEXT, "--json")
    assert json.loads(kvconnect("warm", url, model, *prompt)[1])["blocks"] == 5
    found = json.loads(kvconnect("warm", url, model, *prompt, "--tokens-per-block", 16)[1])
    assert (found["blocks"], found["present"]) == (10, 0)


def test_a_prompt_is_warmed_under_its_salt(kvconnect, url, model):
    kvconnect("warm", url, model, "--prompt", TEXT, "--salt", "mine")
    store = PromptStore(url, model)
    assert store.drop(prompts=TEXT, salt="mine", dry_run=True).blocks == 5
    assert store.drop(prompts=TEXT, dry_run=True).blocks == 0
    assert store.warm(prompts=TEXT, salt="mine").present == 5


def test_interrupted_warm_says_how_far_it_came_and_goes_on(
    kvconnect, url, model, tmp_path, monkeypatch
):
    monkeypatch.setattr(warm, "_AT_ONCE", 1)
    monkeypatch.setattr(warm, "_SETTLE_S", 60.0)  # on a busy machine a save may take 5 s
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("\n".join(json.dumps([one, *PROMPT]) for one in range(6)))
    plain = Generation.submit
    count = []

    def submit(self, *rest, **named):
        count.append(1)
        if len(count) == 3:
            with ThreadPoolExecutor(1) as beside:  # the saves of the first end in the background
                while len(beside.submit(entries, url).result()) < 2:
                    pass
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, *rest, **named)

    monkeypatch.setattr(Generation, "submit", submit)
    code, out, _ = kvconnect("warm", url, model, "--jsonl", lines, "--json")
    found = json.loads(out)
    assert (code, found["complete"]) == (130, False)
    assert 2 <= found["blocks"] <= 6
    assert found["tokens"] + found["missing"] == 6 * 65
    stored = len(entries(url))
    assert 2 <= stored <= 6, "what was computed is saved all the same"
    found = json.loads(kvconnect("warm", url, model, "--jsonl", lines, "--json")[1])
    assert (found["blocks"], found["present"]) == (12 - stored, stored)
    assert found["complete"]


KILLED = """
import os, signal, sys
from kvconnect import PromptStore
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.operations import warm
plain = DiskBackend.save_sealed
async def save_sealed(self, *given):
    stored = await plain(self, *given)
    if (await self.stats())["blocks"] >= 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return stored
DiskBackend.save_sealed = save_sealed
warm._AT_ONCE = 1
PromptStore(sys.argv[1], sys.argv[2]).warm(prompts=eval(sys.argv[3]))
"""


@pytest.mark.slow
def test_a_killed_warm_is_repeated(url, model):
    prompts = [[one, *PROMPT] for one in range(6)]
    done = subprocess.run([sys.executable, "-c", KILLED, url, model, repr(prompts)], check=False)
    assert done.returncode == -signal.SIGKILL
    stored = len(entries(url))
    assert 3 <= stored < 12
    found = PromptStore(url, model).warm(prompts=prompts)
    assert (found.blocks, found.present, found.complete) == (12 - stored, stored, True)
    assert PromptStore(url, model).warm(prompts=prompts).present == 12


def test_what_the_store_does_not_take_is_said(kvconnect, url, model, monkeypatch):
    async def nothing(self, blocks):
        return 0

    monkeypatch.setattr(GuardedBackend, "save", nothing)
    monkeypatch.setattr(warm, "_SETTLE_S", 0.2)
    code, out, err = kvconnect("warm", url, model, "--prompt", TEXT, "--json")
    found = json.loads(out)
    assert (code, found["blocks"], found["missing"], found["complete"]) == (1, 0, 152, False)
    assert "some blocks were not saved" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give URL and MODEL, or --server"),
        (("disk:x", "--server", "http://h"), "give URL and MODEL, or --server"),
        (("disk:x",), "MODEL is needed"),
        (("disk:x", "/nowhere"), "not a directory"),
        (("--server", "localhost:8000"), "is no URL"),
    ],
)
def test_refusals(kvconnect, arguments, message):
    code, _, err = kvconnect("warm", *arguments, "--prompt", "x")
    assert code == 2
    assert message in err


def test_keys_and_whole_stores_cannot_be_computed(url, model):
    for which in ({"everything": True}, {"keys": ["a" * 8]}, {"prompts": "x", "keys": ["a" * 8]}):
        with pytest.raises(ConfigurationError, match="give prompts or messages"):
            PromptStore(url, model).warm(**which)


def test_a_store_that_cannot_be_reached_is_exit_code_4(kvconnect, closed_port, model):
    url = f"redis://127.0.0.1:{closed_port}/0?timeout=200ms"
    code, _, err = kvconnect("warm", url, model, "--prompt", "x")
    assert code == 4, err
    assert str(closed_port) in err


def test_a_server_that_cannot_be_reached_is_exit_code_4(kvconnect, closed_port):
    server = f"http://127.0.0.1:{closed_port}"
    code, _, err = kvconnect("warm", "--server", server, "--prompt", "x")
    assert code == 4
    assert server in err
