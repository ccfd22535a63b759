"""A server whose engine has two ranks: it answers as one rank does, and ends with them."""

from __future__ import annotations

import signal

import psutil
import pytest
from server_process import running, wait_until

from kvconnect.cli.main import main

PROMPT = "A system prompt that every restart of the server should find again. " * 4
ASKED = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
TWO = ("--tensor-parallel-size", "2", "--device", "cpu")


def ranks_of(server) -> list[psutil.Process]:
    """The processes of the other ranks."""
    children = psutil.Process(server.pid).children(recursive=True)
    return [one for one in children if "kvconnect.engine.ranks" in one.cmdline()]


@pytest.mark.slow
def test_what_one_rank_has_stored_two_ranks_answer_with(model, tmp_path):
    url = f"disk://{tmp_path}/store?capacity=64MiB"
    store = ("--store", url, "--lookup-timeout-ms", "60000", "--no-overlap-loads")
    with running(model, tmp_path / "one", *store) as server, server.client() as client:
        expected = client.completions.create(**ASKED).choices[0].text
        assert server.stop(signal.SIGTERM) == 0  # what is to be stored is
    with running(model, tmp_path / "two", *store, *TWO) as server, server.client() as client:
        answer = client.completions.create(**ASKED)
        assert answer.choices[0].text == expected
        assert server.figure("kvconnect_hit_tokens_total", tier="store") > 0
        ranks = ranks_of(server)
        assert len(ranks) == 1
        assert server.stop(signal.SIGTERM) == 0
    assert not psutil.wait_procs(ranks, timeout=60)[1]


@pytest.mark.slow
def test_a_server_ends_with_a_rank(model, tmp_path):
    with running(model, tmp_path / "output", *TWO) as server:
        [rank] = ranks_of(server)
        rank.kill()
        wait_until(lambda: not server.process.is_alive(), "the server ends")
        assert server.process.exitcode not in {0, None}
        assert "rank 1 is lost" in server.said()


def test_a_size_that_does_not_divide_the_model_names_those_that_do(model, capsys):
    assert main(["serve", str(model), "--port", "0", "--tensor-parallel-size", "3"]) == 2
    assert "sizes that work: 1, 2, 4" in capsys.readouterr().err
