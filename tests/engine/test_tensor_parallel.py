"""Engines of several ranks, each in a process of its own: equal tokens, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from observed import patient, tokens

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.engine.ranks import group as group_module
from kvconnect.engine.ranks import leader as leader_module
from kvconnect.engine.ranks import meeting as meeting_module
from kvconnect.engine.ranks.group import RankGroup
from kvconnect.engine.ranks.meeting import Meeting
from kvconnect.errors import (
    ConfigurationError,
    ConnectorContractError,
    EngineClosed,
    RankLost,
    UnsupportedModel,
)

SCRIPT = Path(__file__).with_name("rank_script.py")
LOST_RANK = Path(__file__).with_name("lost_rank_script.py")
GREEDY = SamplingParams(max_tokens=20)
LONG = SamplingParams(max_tokens=230, ignore_eos=True)
ARCHITECTURES = ["llama", "gpt_neox", "mistral", "gemma3", "deepseek_v3", "mixtral"]


@pytest.fixture
def open_ranks(model_of) -> Iterator[Callable[..., LLM]]:
    """Opens engines of several ranks in float64; closes them at the end."""
    opened: list[LLM] = []

    def open_one(arch: str = "llama", size: int = 2, **more: object) -> LLM:
        cache = {"tokens_per_block": 8, "max_tokens": 320} | more.pop("cache", {})
        if isinstance(url := more.get("connector"), str):
            more["connector"] = patient(url)
        settings = {"dtype": "float64", "device": "cpu", "max_num_tokens": 48} | more
        config = KvCacheConfig(**cache)
        opened.append(LLM(model_of(arch), tensor_parallel_size=size, kv_cache=config, **settings))
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + 60
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < until, f"processes {left} are left"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def many(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts that share beginnings of any length, more than the cache has room for."""
    rng = np.random.default_rng(3)
    return [
        [*(base := prompts[index % 5])[: int(rng.integers(0, len(base) + 1))], index, 9, 9]
        for index in range(8)
    ]


def check_equal(llm: LLM, arch: str, reference, prompts, model_of) -> None:
    """Twice, so that blocks come from the device, from the host, and parts of them by copies."""
    asked = [*prompts, *many(prompts)]
    expected = reference(model_of(arch), asked, 20)
    assert tokens(llm.generate(asked, GREEDY)) == expected
    aborted = llm.submit(asked[0], LONG)
    next(aborted.stream())
    aborted.abort()
    assert tokens(llm.generate(asked, GREEDY)) == expected
    stats = llm.stats()
    assert stats.reused_device_tokens > stats.reused_host_tokens > 0


def test_equal_tokens_then_a_rank_is_killed(open_ranks, reference, prompts, model_of, tmp_path):
    store = f"disk://{tmp_path}/store?capacity=64MiB"
    llm = open_ranks(connector=store, cache={"host_cache_size": 100_000})
    with pytest.raises(ConfigurationError, match="one such engine at a time"):
        open_ranks()
    check_equal(llm, "llama", reference, prompts, model_of)
    # A rank is killed while it computes.
    assert len(llm.process_ids) == 2
    handles = [llm.submit([one, 2, 3], LONG) for one in range(3)]
    next(handles[0].stream())
    killed = time.monotonic()
    os.kill(llm.process_ids[1], signal.SIGKILL)
    for handle in handles:
        with pytest.raises(RankLost, match="rank 1 is lost") as lost:
            handle.result()
        assert lost.value.rank == 1
    assert time.monotonic() - killed < 60
    with pytest.raises(EngineClosed):
        llm.generate([1, 2, 3], GREEDY)
    llm.close()


def test_a_follower_ends_with_the_pipe_to_its_leader():
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "kvconnect.engine.ranks", "1"], stdin=subprocess.PIPE
    ) as process:
        start = {"sys_path": sys.path, "port": 1, "prepare": []}
        process.stdin.write(f"{json.dumps(start)}\n{{}}\n".encode())
        process.stdin.close()
        assert process.wait(60) == 1


@pytest.mark.parametrize("settings", [{"kv_cache_manager": lambda *_: None}, {"device": "cuda:0"}])
def test_what_serves_one_rank_is_refused_before_any_process_starts(settings, open_ranks):
    with pytest.raises(ConfigurationError, match="tensor_parallel_size"):
        open_ranks(**settings)


# ---------------------------------------------------------------------- long forms


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_equal_tokens(arch, size, open_ranks, reference, prompts, model_of, tmp_path):
    store = f"disk://{tmp_path}/store?capacity=64MiB"
    llm = open_ranks(arch, size, connector=store, cache={"host_cache_size": 400_000})
    check_equal(llm, arch, reference, prompts, model_of)
    llm.close()
    again = open_ranks(arch, size, connector=store)
    assert tokens(again.generate(prompts, GREEDY)) == reference(model_of(arch), prompts, 20)
    assert again.stats().reused_store_tokens > 0


@pytest.fixture
def started(monkeypatch) -> list[int]:
    """Process ids of the followers that are started, as they are."""
    pids: list[int] = []
    start = subprocess.Popen.__init__

    def note(self, *args, **kwargs):
        start(self, *args, **kwargs)
        pids.append(self.pid)

    monkeypatch.setattr(subprocess.Popen, "__init__", note)
    return pids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "size", "reason"),
    [("gpt2", 2, "no tensor-parallel plan"), ("llama", 3, "sizes that work: 1, 2, 4")],
)
def test_a_model_that_cannot_be_divided_starts_no_process(arch, size, reason, open_ranks, started):
    with pytest.raises(UnsupportedModel, match=reason):
        open_ranks(arch, size)
    assert started == []


@pytest.mark.slow
def test_a_rank_that_is_stopped_while_it_loads_is_named(open_ranks, started, monkeypatch):
    monkeypatch.setattr(meeting_module, "_SILENT_S", 3.0)
    beats = meeting_module._Beats
    stopped_at = []

    class Stopping(beats):
        def check(self, rank):
            super().check(rank)
            if rank in self._heard and not stopped_at:
                os.kill(started[0], signal.SIGSTOP)
                stopped_at.append(time.monotonic())

    monkeypatch.setattr(meeting_module, "_Beats", Stopping)
    with pytest.raises(RankLost, match="rank 1 is lost: no sign of life for 3 s while it loaded"):
        open_ranks()
    assert time.monotonic() - stopped_at[0] < 60
    wait_until_gone(started)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "when", "error"),
    [
        (signal.SIGKILL, "go_on", "rank 1 is lost: process [0-9]+ ended by signal 9"),
        (signal.SIGKILL, "connect", "rank 1 is lost"),
        (signal.SIGSTOP, "go_on", "rank 1 is lost: it did not connect within"),
        (signal.SIGSTOP, "connect", "rank 1 is lost: (it did not connect|no sign of life)"),
    ],
)
def test_a_rank_that_is_lost_while_ranks_connect_is_named_in_time(
    number, when, error, open_ranks, started, monkeypatch
):
    monkeypatch.setattr(leader_module, "CONNECT_S", 3.0)
    monkeypatch.setattr(group_module, "CONNECT_S", 3.0)
    owner = Meeting if when == "go_on" else RankGroup
    call = getattr(owner, when)
    lost_at = []

    def lose(self, *args):
        os.kill(started[0], number)
        lost_at.append(time.monotonic())
        return call(self, *args)

    monkeypatch.setattr(owner, when, lose)
    with pytest.raises(RankLost, match=error) as lost:
        open_ranks()
    assert time.monotonic() - lost_at[0] < 60
    assert lost.value.rank == 1
    wait_until_gone(started)
    monkeypatch.undo()
    assert open_ranks().generate([1, 2, 3], GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 3])
def test_an_idle_engine_notices_that_a_rank_died(rank, open_ranks):
    llm = open_ranks(size=4)
    llm.generate([1, 2, 3], GREEDY)
    pids = llm.process_ids
    os.kill(pids[rank], signal.SIGKILL)
    until = time.monotonic() + 60
    with pytest.raises(EngineClosed) as closed:  # noqa: PT012
        while time.monotonic() < until:
            llm.check_health()
            time.sleep(0.01)
    assert f"rank {rank} is lost" in str(closed.value.__cause__)
    wait_until_gone(pids[1:])


@pytest.mark.slow
def test_engines_that_lost_a_rank_leave_no_descriptors(model_of):
    """Not even while they and their errors are kept."""
    run = subprocess.run(
        [sys.executable, LOST_RANK, model_of("llama")], stdout=subprocess.PIPE, check=True
    )
    first, second, third = json.loads(run.stdout)  # libraries keep some
    assert (second, third) == (first, first)


@pytest.mark.slow
def test_after_a_killed_rank_an_engine_is_made_again_and_loads_what_was_saved(
    open_ranks, reference, prompts, model_of, tmp_path
):
    store = f"disk://{tmp_path}/store?capacity=64MiB"
    expected = reference(model_of("llama"), prompts, 20)
    llm = open_ranks(connector=store)
    assert tokens(llm.generate(prompts, GREEDY)) == expected
    os.kill(llm.process_ids[1], signal.SIGKILL)
    with pytest.raises((RankLost, EngineClosed)):
        llm.generate([1, 2, 3], LONG)
    llm.close()
    again = open_ranks(connector=store, speculative="ngram", scheduling="max_utilization")
    assert tokens(again.generate(prompts, GREEDY)) == expected
    assert again.stats().reused_store_tokens > 0
    left = again.process_ids[1:]
    again.close()
    wait_until_gone(left)


@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_the_engine(open_ranks):
    llm = open_ranks()
    handle = llm.submit([1, 2, 3], LONG)
    next(handle.stream())
    os.kill(llm.process_ids[1], signal.SIGSTOP)
    stopped = time.monotonic()
    with pytest.raises(RankLost, match="rank 1 is lost: no sign of life"):
        handle.result()
    assert time.monotonic() - stopped < 60
    wait_until_gone(llm.process_ids[1:])


@contextmanager
def serving(model: Path, **more: object) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A script with an engine of two ranks, and the process ids of the followers."""
    command = [sys.executable, SCRIPT, model, "2", "serve"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more
    ) as process:
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read().decode()
            yield process, json.loads(line)
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True])
def test_followers_do_not_outlive_a_killed_leader(stopped, llama):
    with serving(llama) as (process, pids):
        if stopped:
            os.kill(pids[0], signal.SIGSTOP)
        process.kill()
        wait_until_gone(pids)


@pytest.mark.slow
def test_a_leader_that_was_stopped_and_goes_on_ends_with_an_error(llama):
    """Its follower gave it up and ended meanwhile: 5 of 9 were silent for over 30 s once."""
    for _ in range(4):
        with serving(llama) as (process, pids):
            process.send_signal(signal.SIGSTOP)
            wait_until_gone(pids)
            process.send_signal(signal.SIGCONT)
            _, errors = process.communicate(timeout=60)
        assert b"RankLost" in errors


def failing(worker: str, scheduler: str = "Scheduler") -> KvCacheConnectorConfig:
    return KvCacheConnectorConfig(
        connector_module="rank_connectors",
        connector_scheduler_class=scheduler,
        connector_worker_class=worker,
    )


@pytest.mark.slow
def test_what_goes_wrong_for_one_request_ends_that_one_alone(
    open_ranks, reference, prompts, model_of
):
    llm = open_ranks(connector=failing("FollowerCannotLoad", "Picky"))
    expected = reference(model_of("llama"), prompts, 20)
    for params, error in [
        ({"raise_in": "get_num_new_matched_tokens"}, "get_num_new_matched_tokens of one request"),
        ({"raise_in": "request_finished"}, "request_finished of one request"),
        ({"match": 8, "loads": True}, "rank 1: RuntimeError: cancel of one request"),
    ]:
        handles = [
            llm.submit(prompt, GREEDY, kv_transfer_params=params if number == 1 else None)
            for number, prompt in enumerate(prompts)
        ]
        with pytest.raises((RuntimeError, ConnectorContractError), match=error):
            handles[1].result(60)
        answered = [handle.result(60) for handle in (*handles[:1], *handles[2:])]
        assert tokens(answered) == expected[:1] + expected[2:]
    assert tokens(llm.generate(prompts, GREEDY)) == expected
    until = time.monotonic() + 60  # the last one's blocks go with the next step
    while (stats := llm.stats()).free_blocks < stats.max_blocks:
        assert time.monotonic() < until, stats
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker", "error"),
    [
        ("FollowerFails", "rank 1: RuntimeError: the second rank has had enough"),
        ("LeaderFails", "the first rank has had enough"),
        ("FollowerExits", "rank 1: SystemExit: planted"),
        ("FollowerIsInterrupted", "rank 1: KeyboardInterrupt: planted"),
        ("LeaderExits", "planted"),
    ],
)
def test_a_connector_that_raises_amid_the_forward_pass_ends_all_ranks(worker, error, open_ranks):
    llm = open_ranks(connector=failing(worker))
    began = time.monotonic()
    with pytest.raises((ConnectorContractError, RuntimeError, SystemExit), match=error):
        llm.generate([1, 2, 3], GREEDY)
    assert time.monotonic() - began < 60
    wait_until_gone(llm.process_ids[1:])


@pytest.mark.slow
def test_a_connector_that_cannot_be_made_on_one_rank_is_an_error_of_the_engine(open_ranks):
    with pytest.raises((ConfigurationError, RankLost), match="no room on the second rank"):
        open_ranks(connector=failing("FailsToStart"))
    with pytest.raises((ConfigurationError, RankLost), match="rank 1 could not start: SystemExit"):
        open_ranks(connector=failing("FollowerExitsAtStart"))


@pytest.mark.slow
def test_metadata_that_is_too_large_is_said_to_be(open_ranks):
    llm = open_ranks(connector=failing("Worker", "TooMuchToTell"))
    with pytest.raises(ConnectorContractError, match="over 1073741824 bytes"):
        llm.generate([1, 2, 3], GREEDY)


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks(llama):
    with serving(llama, start_new_session=True) as (process, pids):
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors
    wait_until_gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["answer", "forget"])
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--nproc-per-node=2"]])
def test_a_script_without_a_guard_also_under_torchrun(what, launcher, model_of, reference):
    run = subprocess.run(
        [sys.executable, *launcher, SCRIPT, model_of("llama"), "2", what],
        capture_output=True,
        timeout=120,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr.decode()
    assert [json.loads(line) for line in run.stdout.splitlines()] == reference(
        model_of("llama"), [range(40)], 8
    )


@pytest.mark.slow
def test_torchrun_with_another_number_of_processes_is_refused(model_of):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=1"]
    run = subprocess.run(
        [sys.executable, *launcher, SCRIPT, model_of("llama"), "2", "answer"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert run.returncode != 0
    assert b"use --nproc-per-node=2" in run.stderr
