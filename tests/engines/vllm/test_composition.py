"""Beside other connectors, over several processes, with several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

from free_ports import free_ports
from vllm_engine import Engine, connector, engine, prompts_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

PROMPTS = prompts_of(500, 320, 33)
LOADED = [480, 320, 32]  # what of them a load in the background brings: all whole blocks
HERE = Path(__file__).parent
CHILD_S = 200


def test_as_a_child_of_multi_connector(llama, store, tmp_path):
    """Beside a connector of vLLM's own, and with a second store: the first that has it loads."""
    second = connector(f"disk://{tmp_path}/second?capacity=64MiB")
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [connector(store), second]},
    }
    with engine(llama, transfer) as made:
        cold = made.answer(PROMPTS)
        for child in made.worker._connectors:
            assert child._worker._worker._queue.flush(60)
        made.forget_device()
        loaded = made.answer(PROMPTS)
        made.settle()
        for child in made.connector._connectors:
            assert not child._scheduler._tracked
    assert [one.tokens for one in loaded] == [one.tokens for one in cold]
    assert [one.cached for one in loaded] == LOADED
    with engine(llama, second) as other:  # both have it
        assert [one.cached for one in other.answer(PROMPTS)] == LOADED


def run(model: Path, transfer: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What an engine in a process of its own answers to `PROMPTS`, or to those in `more`."""
    job = {"model": str(model), "transfer": transfer, "prompts": PROMPTS} | more
    done = subprocess.run(
        [sys.executable, str(HERE / "vllm_child.py")],
        input=json.dumps(job),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def environment() -> dict[str, str]:
    return os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or two ranks want two NUMA nodes
        "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }


def test_prefill_and_decode_from_peer_to_peer(llama):
    """Over kvconnect's own transfer: a store that is the memory of those that run."""
    port = free_ports(2)

    def url(own: int, other: int) -> str:
        where = f"nixl://127.0.0.1:{other}?listen=127.0.0.1:{own}&transport=tcp"
        return f"{where}&capacity=64MiB&patience=1s&timeout=10s"

    with engine(llama, None) as plain:
        wanted = plain.tokens(PROMPTS)
    prefill = connector(url(port, port + 1), KV_ROLE="kv_producer")
    with prefilled(llama, prefill) as params:
        assert params == [{"kvconnect_num_tokens": n} for n in (480, 320, 32)]
        decode = connector(url(port + 1, port), KV_ROLE="kv_consumer", producer_timeout_s=20.0)
        with engine(llama, decode) as made:
            found = [
                made.answer([prompt], params=one)[0]
                for prompt, one in zip(PROMPTS, params, strict=True)
            ]
    assert [one.tokens for one in found] == wanted
    assert [one.cached for one in found] == LOADED


@contextmanager
def prefilled(
    model: Path, transfer: dict[str, Any], params: dict[str, Any] | None = None
) -> Iterator[list[dict[str, Any]]]:
    """What a prefill engine that goes on in a process of its own tells of each of `PROMPTS`."""
    child = subprocess.Popen(
        [sys.executable, str(HERE / "vllm_child.py")],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    ends = Timer(CHILD_S, child.kill)  # then its stdout ends
    ends.start()
    try:
        job = {"model": str(model), "transfer": transfer, "prompts": PROMPTS, "num_tokens": 1}
        job |= {"params": [params] * len(PROMPTS), "stays": True}
        child.stdin.write(json.dumps(job) + "\n")
        child.stdin.flush()
        answer = next((line for line in child.stdout if line.startswith("{")), None)
        assert answer, "the prefill engine ended; see its stderr"
        yield json.loads(answer)["params"]
    finally:
        child.stdin.close()
        child.wait(CHILD_S)
        ends.cancel()
        child.stdout.close()


@pytest.fixture
def own_cores() -> Iterator[None]:
    """NixlConnector keeps the process that it is in to one core."""
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.usefixtures("own_cores")
def test_beside_vllms_own_connector_from_prefill_to_decode(llama, store, tmp_path, monkeypatch):
    """A prompt goes from peer to peer while both engines run, and into each one's store."""
    pytest.importorskip("nixl", reason="nixl is not installed here: make test-engines")
    second = f"disk://{tmp_path}/second?capacity=256MiB"

    def both(role: str, url: str) -> dict[str, Any]:
        peer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        return {
            "kv_connector": "MultiConnector",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [peer, connector(url)]},
        }

    with engine(llama, None) as plain:
        wanted = plain.tokens(PROMPTS)
    port = free_ports(2)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
    told = {"do_remote_decode": True}
    with prefilled(llama, both("kv_producer", store), told) as params:
        assert all(one["do_remote_prefill"] for one in params)
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port + 1))
        with engine(llama, both("kv_consumer", second)) as decode:
            loads, bound = watched(decode)
            found = [
                decode.answer([prompt], params=one)[0].tokens
                for prompt, one in zip(PROMPTS, params, strict=True)
            ]
            assert found == wanted
            # A peer has the whole prompt. (As cached, vLLM reports what the peer had cached: none.)
            assert loads == [("peer", len(prompt)) for prompt in PROMPTS]
            assert decode.worker._connectors[1]._worker._worker._queue.flush(60)
            # What came from the peer is in this engine's store as well.
            decode.forget_device()
            loads.clear()
            decode.check(PROMPTS, wanted, LOADED)
            assert loads == [("store", number) for number in LOADED]
            assert bound == {("peer", "NixlConnectorMetadata"), ("store", "StepMeta")}
            decode.settle()
            assert not decode.connector._connectors[1]._scheduler._tracked
    with engine(llama, connector(store)) as other:  # the peer is gone, but for its store
        assert [one.cached for one in other.answer(PROMPTS)] == LOADED


def watched(made: Engine) -> tuple[list[tuple[str, int]], set[tuple[str, str]]]:
    """What from now on each of two children loads, and the kinds of metadata that it gets."""
    loads: list[tuple[str, int]] = []
    bound: set[tuple[str, str]] = set()
    for halves in (made.connector._connectors, made.worker._connectors):
        for name, half in zip(("peer", "store"), halves, strict=True):
            watch(name, half, loads, bound)
    return loads, bound


def watch(name: str, half: Any, loads: list[tuple[str, int]], bound: set[tuple[str, str]]) -> None:
    update, bind = half.update_state_after_alloc, half.bind_connector_metadata

    def updated(request, blocks, number):
        if number:
            loads.append((name, number))
        update(request, blocks, number)

    def binding(metadata):
        bound.add((name, type(metadata).__name__))
        bind(metadata)

    half.update_state_after_alloc, half.bind_connector_metadata = updated, binding


@pytest.mark.planted("rank-share", "vllm", "equal")
@pytest.mark.planted("other-rank-count", "vllm", "equal")
def test_two_ranks_and_one_read_each_others_blocks(llama, store):
    by_one = prompts_of(140, seed=2)
    two = run(llama, connector(store), tensor_parallel_size=2)
    one = run(llama, connector(store), prompts=[*PROMPTS, *by_one])
    assert one["cached"] == [*LOADED, 0]
    assert one["tokens"][:-1] == two["tokens"]
    scraped = connector(store, metrics_port=24_680)
    again = run(llama, scraped, tensor_parallel_size=2, prompts=[*PROMPTS, *by_one])
    assert again["cached"] == [*LOADED, 128]
    assert again["tokens"][:-1] == two["tokens"]
    blocks = sum(again["cached"]) // 32
    # The core and the two ranks, in the order in which they came to listen.
    assert sorted(again["loaded"][:3]) == [0, blocks, blocks]
    assert again["loaded"][3] is None
