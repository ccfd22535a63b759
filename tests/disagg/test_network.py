"""Failures between two hosts: a real link, shaped to 1 Gbit/s, that can be cut.

A prompt's blocks take most of a second on it, so what happens here happens in the middle of a read.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import networks
import pytest
from engines import ANSWER, PREFILL, EngineProcess, T, open_engine, prompt_of, until

from kvconnect.engine.checkpoint.random_model import make_model

LENGTH = 1200
PROMPT = prompt_of(LENGTH)
LEASE_S = 2.0
SILENCE_S = 2.5
SECRET = "of both sides, and of nobody else"

WHY_NOT = networks.why_not()

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "network namespaces can be made"),
]


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> SimpleNamespace:
    """A model with much KV for little work, what it answers, and how long one prompt takes it."""
    directory = make_model(
        tmp_path_factory.mktemp("wide") / "model",
        num_layers=4,
        num_heads=8,
        num_kv_heads=8,
        max_position_embeddings=2048,
        config_overrides={"head_dim": 128},
    )
    with open_engine(directory, None, max_tokens=2 * LENGTH) as llm:
        llm.generate([PROMPT[:100]], ANSWER)
        (output,) = llm.generate([PROMPT], ANSWER)
        nbytes = -(-LENGTH // T) * llm.layout.block_nbytes
    assert nbytes > 60e6
    answer = list(output.output_token_ids)
    return SimpleNamespace(directory=directory, answer=answer, nbytes=nbytes)


@pytest.fixture
def network() -> Iterator[networks.Network]:
    made = networks.Network()
    yield made
    made.end()


class Pair:
    """A prefill and a decode on two hosts. What happens to them is told from the link."""

    def __init__(self, network: networks.Network, model: Path, transport: str) -> None:
        self.network = network
        self._model = model
        self.transport = transport
        self._started: list[EngineProcess] = []
        self.prefill = self.start("prefill")
        self.decode = self.start("decode")

    def start(self, role: str, port: int = 0) -> EngineProcess:
        """Another engine on the host of its role."""
        host = self.network.prefill if role == "prefill" else self.network.decode
        transfer = {"transport": self.transport, "secret": SECRET, "lease_s": LEASE_S}
        transfer |= {"listen": f"{host.address}:{port}", "device": host.device}
        engine = EngineProcess(
            self._model,
            role,
            host=host,
            environment={"UCX_TLS": "tcp"},
            transfer=transfer,
            max_tokens=2 * LENGTH,
            max_num_tokens=512,
        )
        self._started.append(engine)
        return engine

    def compute(self, prompt: list[int]) -> dict[str, object]:
        """What a decode needs to fetch `prompt`, which the prefill has computed."""
        self.prefill.ask("submit", prompt, PREFILL, {"do": "prefill"})
        _, _, carried = self.prefill.ask("result")
        return dict(carried)

    def begin_read(self) -> float:
        """Has the decode read the prompt; returns a moment of which the read is half over."""
        carried = self.compute(PROMPT)
        before = self.network.decode.nbytes_received()
        self.decode.ask("submit", PROMPT, ANSWER, carried)
        until(lambda: self.network.decode.nbytes_received() - before > 16e6)
        return time.monotonic()

    def answers(self) -> tuple[list[int], int]:
        """What the decode answers, and how many tokens of it were fetched."""
        tokens, fetched, _ = self.decode.ask("result")
        return tokens, fetched

    def fetches_again(self, seed: int = 1) -> bool:
        """Whether another prompt is fetched now."""
        prompt = prompt_of(100, seed)
        self.decode.ask("submit", prompt, ANSWER, self.compute(prompt))
        return self.answers()[1] == 99

    def end(self) -> None:
        for engine in self._started:
            engine.end()


@pytest.fixture(params=["tcp", "nixl"])
def pair(request, wide, network) -> Iterator[Pair]:
    made = Pair(network, wide.directory, request.param)
    yield made
    made.end()


def holds_nothing(engine: EngineProcess) -> None:
    """Every block, lease and read of `engine` comes to an end."""
    held = engine.ask("held")
    end = time.monotonic() + 60
    while held:
        assert time.monotonic() < end, held
        time.sleep(0.02)
        held = engine.ask("held")


slow = pytest.mark.slow


@slow
def test_a_prompt_goes_over_the_link(pair, wide):
    before = pair.network.decode.nbytes_received()
    pair.begin_read()
    assert pair.answers() == (wide.answer, LENGTH - 1)
    # Over the link, and not by shared memory, which namespaces do not keep apart.
    assert pair.network.decode.nbytes_received() - before > wide.nbytes
    for engine in (pair.prefill, pair.decode):
        holds_nothing(engine)


@slow
def test_a_partition_that_is_healed_later(pair, wide):
    cut = pair.begin_read()
    pair.network.cut()
    assert pair.answers() == (wide.answer, 0)
    assert time.monotonic() - cut < 60
    # The prefill does not know of the reader's end, and the reader does not know of the prefill's.
    holds_nothing(pair.prefill)
    holds_nothing(pair.decode)
    pair.network.heal()
    seeds = iter(range(1, 1000))
    until(lambda: pair.fetches_again(next(seeds)))
    for engine in (pair.prefill, pair.decode):
        holds_nothing(engine)


@slow
def test_the_prefill_dies_while_it_is_read(pair, wide):
    killed = pair.begin_read()
    pair.prefill.end()
    assert pair.answers() == (wide.answer, 0)
    assert time.monotonic() - killed < 60
    holds_nothing(pair.decode)
    pair.prefill = pair.start("prefill", pair.prefill.port)
    seeds = iter(range(1, 1000))
    until(lambda: pair.fetches_again(next(seeds)))
    holds_nothing(pair.decode)


@slow
def test_the_reader_dies_while_it_reads(pair, wide):
    killed = pair.begin_read()
    pair.decode.end()
    holds_nothing(pair.prefill)
    assert time.monotonic() - killed < 60
    pair.decode = pair.start("decode")
    pair.begin_read()
    assert pair.answers() == (wide.answer, LENGTH - 1)


@slow
def test_the_prefill_is_frozen_while_it_is_read(pair, wide):
    frozen = pair.begin_read()
    pair.prefill.signal(signal.SIGSTOP)
    assert pair.answers() == (wide.answer, 0)
    assert time.monotonic() - frozen < 60
    pair.prefill.signal(signal.SIGCONT)
    holds_nothing(pair.decode)
    if pair.transport == "nixl" and pair.prefill.aborts_within(LEASE_S):
        # UCX may abort a process that wakes and has a read to answer whose reader went away, as
        # `NixlTransport` says: then it is one more that died.
        pair.prefill = pair.start("prefill", pair.prefill.port)
    holds_nothing(pair.prefill)
    seeds = iter(range(1, 1000))
    until(lambda: pair.fetches_again(next(seeds)))


@slow
def test_the_reader_is_frozen_for_longer_than_its_lease(pair, wide):
    """What it reads when it wakes is another prompt's by then."""
    pair.begin_read()
    pair.decode.signal(signal.SIGSTOP)
    holds_nothing(pair.prefill)
    for seed in (1, 2):
        pair.prefill.ask("submit", prompt_of(LENGTH - 100, seed), PREFILL, {"of": "others"})
        pair.prefill.ask("result")
    pair.decode.signal(signal.SIGCONT)
    assert pair.answers() == (wide.answer, 0)
    holds_nothing(pair.decode)
    seeds = iter(range(1, 1000))
    until(lambda: pair.fetches_again(next(seeds)))


def test_a_kill_leaves_no_namespace_behind():
    running = subprocess.Popen(
        [sys.executable, networks.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    holders = [int(pid) for pid in running.stdout.readline().split()]
    spaces = {Path(f"/proc/{pid}/ns/net").readlink() for pid in holders}
    assert len(spaces - {Path("/proc/self/ns/net").readlink()}) == 2
    os.kill(running.pid, signal.SIGKILL)
    running.communicate(timeout=60)
    until(lambda: not spaces & _spaces())


def _spaces() -> set[Path]:
    """The network namespaces of all processes."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add((process / "ns" / "net").readlink())
        except OSError:
            continue  # it has ended
    return found
