"""Runs vLLM with each connector: cold, idle, and again after a restart from disk.

The floor of a restart is that of ``bench restart``: reading the prompt's KV from the disk, one pass
into memory, and the answer to a prompt that the device has. All connectors are compared with one
floor, that of the same run. Before a restart their files are dropped from the page cache, because
some connectors read past it and others through it.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvconnect.bench.report import Figure
from kvconnect.bench.restart import cold_read_seconds, first_pass_seconds, forget_files
from kvconnect.bench.workload import random_prompt
from kvconnect.errors import ConfigurationError
from kvconnect_bench.blocks.party import Party, PartyFailed
from kvconnect_bench.engines.plan import OURS, TIERS, EnginesPlan
from kvconnect_bench.peer_python import require_peer_python

_PEER = "kvconnect_bench.peers.vllm_connectors"
_WARM_UP = 100
_BLOCK = 32


@dataclass(slots=True)
class _Measured:
    """The measurements of one connector, in seconds but for `tokens`, `cached` and `wrong`.

    `scheduler` has the fields of the peer's `Spent` for each computed prompt, up to its first
    token. For a tier, `scheduler` and `inside` count the time inside the tier alone; `around` of a
    decode step includes vLLM's offloading.
    """

    cold: float = math.nan
    scheduler: list[dict[str, float]] = field(default_factory=list)
    step: float = math.nan
    inside: float = math.nan
    around: float = math.nan
    device: list[float] = field(default_factory=list)
    restored: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    wrong: int = 0
    tokens: list[int] = field(default_factory=list)

    def restart(self, party: Party, prompt: list[int]) -> None:
        """Adds the answer of an engine that was started again."""
        said = party.ask("answer", prompt=prompt, max_tokens=2)
        party.ask("stop")
        self.restored.append(said["first"])
        self.cached.append(said["cached"])
        self.wrong += said["tokens"] != self.tokens


def bench_engines(
    model: Path, scratch: Path, plan: EnginesPlan, python: Path, tell: Callable[[str], object]
) -> list[Figure]:
    """Measures each connector, with medians of restarts in which connectors take turns.

    Blocks for minutes.

    Args:
        model: directory; computed with in float32.
        scratch: an empty directory for the stores, on the disk that is to be measured.
        plan: the settings of the run.
        python: an interpreter that has vLLM, and what kvconnect needs.
        tell: called with a sentence where something is left out.

    Raises:
        ConfigurationError: there is no such interpreter, this is no checkout, or none of the
            connectors starts.
    """
    require_peer_python(python)
    prompt = random_prompt(plan.prompt_tokens, seed=1).tolist()

    def started(name: str) -> Party:
        return started_engine(model, scratch / name, name, plan.longest, python)

    measured: dict[str, _Measured] = {}
    for name in plan.connectors:
        tell(f"{name}: cold, then idle")
        (scratch / name).mkdir()
        try:
            with started(name) as party:
                measured[name] = _cold(party, name, plan, prompt)
        except PartyFailed as failed:
            tell(f"{name}: is left out: {failed}")
    if not measured:
        raise ConfigurationError(f"--connectors {','.join(plan.connectors)}: none of them starts")
    reads: list[float] = []
    copies: list[float] = []
    nbytes = _kv_nbytes(model, plan.prompt_tokens)
    source = _source(scratch, nbytes)
    for _ in range(plan.repeats):
        reads.append(cold_read_seconds(source, nbytes))
        copies.append(first_pass_seconds(nbytes))
        for name, one in measured.items():
            if name != "none":
                tell(f"{name}: after a restart")
                forget_files(scratch / name)
                with started(name) as party:
                    one.restart(party, prompt)
    return _figures(measured, plan, reads, copies, nbytes)


def _cold(party: Party, name: str, plan: EnginesPlan, prompt: list[int]) -> _Measured:
    """Measures an engine's first life: it saves the prompt, then the connector is idle."""
    found = _Measured()
    said = party.ask("answer", prompt=prompt, max_tokens=2)
    found.cold, found.tokens = said["first"], said["tokens"]
    part = "tier" if name in TIERS else "connector"
    found.scheduler.append(said[part])
    party.ask("settle")
    for number in range(1, plan.repeats):
        new = random_prompt(plan.prompt_tokens, seed=3 + number).tolist()
        found.scheduler.append(party.ask("answer", prompt=new, max_tokens=2)[part])
        party.ask("settle")
    short = random_prompt(_WARM_UP, seed=3).tolist()
    steps = party.ask("answer", prompt=short, max_tokens=plan.steps + 20)["steps"][10:-5]
    whole, connector, tier, _ = (statistics.median(some) for some in zip(*steps, strict=True))
    found.step, found.around = whole, connector
    found.inside = tier if name in TIERS else connector
    for _ in range(plan.repeats):
        found.device.append(party.ask("answer", prompt=prompt, max_tokens=2)["first"])
    party.ask("stop")
    return found


def started_engine(model: Path, directory: Path, name: str, longest: int, python: Path) -> Party:
    """Returns the process of an engine that has answered once. The caller closes it.

    Args:
        model: directory.
        directory: of the connector's store.
        name: of the connector.
        longest: tokens of a prompt and its answer.
        python: an interpreter that has vLLM.

    Raises:
        PartyFailed: the engine does not start.
    """
    party = Party(python, _PEER)
    try:
        party.ask(
            "start",
            model=str(model),
            connector=name,
            directory=str(directory),
            longest=longest,
        )
        # The time of vLLM's first computation is not the connector's.
        warm_up = random_prompt(_WARM_UP, seed=2).tolist()
        party.ask("answer", prompt=warm_up, max_tokens=2)
    except PartyFailed:
        party.close()
        raise
    return party


def _figures(
    measured: dict[str, _Measured],
    plan: EnginesPlan,
    reads: Sequence[float],
    copies: Sequence[float],
    nbytes: int,
) -> list[Figure]:
    median = statistics.median
    suffix = median(second for one in measured.values() for second in one.device)
    floor = median(reads) + median(copies) + suffix
    blocks = plan.prompt_tokens // _BLOCK
    figures = [
        Figure("prompt", plan.prompt_tokens, "tokens"),
        Figure("its KV", nbytes / 2**20, "MiB"),
        Figure("floor: cold read", median(reads) * 1e3, "ms"),
        Figure("floor: one pass into new memory", median(copies) * 1e3, "ms"),
        Figure("floor: last token", suffix * 1e3, "ms"),
    ]
    for name, one in measured.items():
        ours = name in OURS
        figures.append(Figure(f"{name}: first token, computed", one.cold * 1e3, "ms"))
        figures.append(Figure(f"{name}: decode step", one.step * 1e3, "ms"))
        if name == "none":
            continue
        figures += _of_scheduler(name, one, blocks)
        figures += [
            Figure(f"{name}: tokens found after a restart", min(one.cached), "tokens"),
            Figure(f"{name}: wrong answers", one.wrong, "", "0"),
        ]
        restored = median(one.restored)
        figures += [
            Figure(f"{name}: first token, restored", restored * 1e3, "ms"),
            Figure(f"{name}: computed / restored", one.cold / restored, "x", ">= 10" * ours),
            Figure(f"{name}: restored / floor", restored / floor, "x", "<= 1.25" * ours),
        ]
    return figures


def _of_scheduler(name: str, one: _Measured, blocks: int) -> list[Figure]:
    """Returns the figures of the scheduler's thread for a connector, or for a tier alone."""
    ours = name in OURS
    spent = {part: statistics.median(of[part] for of in one.scheduler) for part in one.scheduler[0]}
    waited = spent["wall"] - spent["admission"] - spent["rest"]
    figures = [Figure(f"{name}: of it in the scheduler", one.inside * 1e6, "us", "<= 50" * ours)]
    if name in TIERS:
        around = (one.around - one.inside) * 1e6
        figures.append(Figure(f"{name}: and in vLLM's offloading around it", around, "us"))
    return [
        *figures,
        Figure(
            f"{name}: admission of a new prompt, for each block",
            spent["admission"] / blocks * 1e6,
            "us",
            "<= 2" * ours,
        ),
        Figure(f"{name}: ordering its saves, for each block", spent["rest"] / blocks * 1e6, "us"),
        Figure(f"{name}: waiting meanwhile", waited * 1e3, "ms"),
    ]


def _source(scratch: Path, nbytes: int) -> Path:
    """Writes a file of `nbytes` bytes, and waits until it is on the disk."""
    path = scratch / "floor"
    with path.open("wb") as file:
        file.write(b"\1" * nbytes)
        file.flush()
        os.fsync(file.fileno())
    return path


def _kv_nbytes(model: Path, num_tokens: int) -> int:
    """Returns the bytes of the prompt's keys and values, in float32."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * dim * 4 * num_tokens)
