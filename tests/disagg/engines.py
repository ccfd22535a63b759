"""Engines that hand prompts to each other: here, or in a process that can be killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from commanded import Commanded
from networks import Host, end_with_parent
from waiting import until

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.connector.disagg.node import TransferNode
from kvconnect.connector.disagg.publisher import Publisher

T = 16
ANSWER = SamplingParams(max_tokens=10, ignore_eos=True)
PREFILL = SamplingParams(max_tokens=0)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng([seed, length]).integers(1, 250, length)]


def open_engine(model: Path, role: str | None, **more: Any) -> LLM:
    """An engine in float64. `more`: of the transfer, of the connector, and of the engine."""
    transfer = {"claim_timeout_s": 120.0} | more.pop("transfer", {})
    connector = {"save_timeout_s": 120.0, "load_timeout_s": 120.0} | more.pop("connector", {})
    cache = KvCacheConfig(
        tokens_per_block=more.pop("tokens_per_block", T), max_tokens=more.pop("max_tokens", 1024)
    )
    config = None
    if role is not None:
        config = KvCacheConnectorConfig(transfer={"role": role} | transfer, **connector)
    return LLM(model, kv_cache=cache, connector=config, dtype="float64", **more)


def hands_out(address: str, transfer_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a router gives to both sides at the same time."""
    return (
        {"do": "prefill", "transfer_id": transfer_id},
        {"transfer_id": transfer_id, "address": address},
    )


def hand_over(
    prefill: LLM, decode: LLM, prompt: list[int], *, asked: list[int] | None = None, **changed: Any
) -> tuple[list[int], int]:
    """What `decode` answers to what `prefill` computed before, and how many tokens it fetched.

    Its prompt may be another one, and `changed` what a router carries, or its ``cache_salt``.
    """
    options = {"cache_salt": changed.pop("cache_salt", None)}
    (first,) = prefill.generate([prompt], PREFILL, kv_transfer_params={"do": "prefill"})
    there = {**first.kv_transfer_params, **changed}
    (output,) = decode.generate([asked or prompt], ANSWER, kv_transfer_params=there, **options)
    return list(output.output_token_ids), output.reused_store_tokens


def result_of(handle: Any) -> tuple[list[int], int]:
    """What a request answers, and how many tokens it fetched."""
    output = handle.result(60)
    return list(output.output_token_ids), output.reused_store_tokens


def node_of(llm: LLM) -> TransferNode:
    """What of the transfer the engine's threads share."""
    node: TransferNode = llm._engine._connector._worker._node  # type: ignore[union-attr]
    return node


def address_of(llm: LLM) -> str:
    """Where other engines reach it."""
    return node_of(llm).address


def is_claimed(llm: LLM) -> bool:
    """Whether a reader waits for a prompt that `llm` has not begun."""
    return bool(node_of(llm).offers.server._waiting)


def leaks_nothing(*engines: LLM) -> None:
    """Every block of `engines` comes back."""
    for llm in engines:
        until(lambda llm=llm: llm.stats().free_blocks == llm.stats().max_blocks)
        stats = llm.stats()
        assert stats.saving_requests + stats.loading_requests + stats.running_requests == 0


def nbytes_read(llm: LLM) -> int:
    """What `llm` has read for the prompts that it still fetches."""
    fetcher = node_of(llm).fetcher
    return 0 if fetcher is None else sum(one.nbytes for one in [*fetcher._fetches.values()])


def held_by(llm: LLM) -> dict[str, int]:
    """What `llm` keeps for requests, peers and reads, by its kind; empty: nothing."""
    stats, node = llm.stats(), node_of(llm)
    held = {
        "blocks": stats.max_blocks - stats.free_blocks,
        "requests": stats.waiting_requests
        + stats.running_requests
        + stats.loading_requests
        + stats.saving_requests,
    }
    connector = llm._engine._connector
    leader, worker = connector._scheduler, connector._worker  # type: ignore[union-attr]
    book = leader._published
    held |= {"prompts": len(book._prompts), "results": len(book._results)}
    held |= {"to fetch": len(leader._fetched._fetches), "ends": len(leader._shared)}
    held |= {"plans": len(leader._plans), "held": len(worker._shared) + len(worker._leaving)}
    held |= {"published": len(worker._publisher._shared)}
    if node.hands_out:
        server = node.offers.server
        held |= {"leases": len(server.table), "leased bytes": server.table.total_nbytes}
        held |= {"waiting claims": len(server._waiting), "kept": len(node.offers._kept)}
        held |= {"ended": len(node.offers._ended)}
    if (fetcher := node.fetcher) is not None:
        held |= {"claims": len(fetcher.claims), "fetches": len(fetcher._fetches)}
        held |= {"expected": len(fetcher._expected)}
        held |= {"quarantined": fetcher._quarantine.quarantined, "leases held": len(node.client)}
        held |= {"handles": len(fetcher._handles), "flying bytes": fetcher._flying_nbytes}
        held |= {"users of links": sum(link.users for link in node.peers.links().values())}
    return {kind: number for kind, number in held.items() if number}


class Gate:
    """Stops a prefill engine of this process behind a layer; on its engine's thread."""

    def __init__(self, stop_at: int) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self._left = stop_at
        self._publish = Publisher.layer_computed
        gate = self

        def layer_computed(publisher: Publisher, layer: int) -> None:
            gate._publish(publisher, layer)
            if publisher._computing and not gate.opened.is_set():
                gate._left -= 1
                if gate._left == 0:
                    gate.reached.set()
                    assert gate.opened.wait(60)

        Publisher.layer_computed = layer_computed  # type: ignore[method-assign]

    def open(self) -> None:
        """Let it go on, and stop it no more."""
        self.opened.set()
        Publisher.layer_computed = self._publish  # type: ignore[method-assign]


class EngineProcess(Commanded):
    """An engine in a process of its own, which does what it is told.

    Args:
        host: it runs there; ``None``: here.
        environment: variables that it has besides.
    """

    def __init__(
        self,
        model: Path,
        role: str,
        *,
        host: Host | None = None,
        environment: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        inside = None if host is None else host.holder.pid
        super().__init__(_Served, inside, dict(environment or {}), model, role, more)
        self.address: str = self.ask("address")

    @property
    def port(self) -> int:
        """That it listens on."""
        return int(self.address.rpartition(":")[2])

    def aborts_within(self, seconds: float) -> bool:
        """Whether it is ended by SIGABRT, soon."""
        self.process.join(seconds)
        return self.process.exitcode == -signal.SIGABRT

    def end_well(self) -> None:
        """Closes the engine before its process ends."""
        self.ask("close")
        self.end()


class _Served:
    """What runs in the process: an answer for each command."""

    def __init__(
        self,
        inside: int | None,
        environment: dict[str, str],
        model: Path,
        role: str,
        more: dict[str, Any],
    ) -> None:
        end_with_parent()
        os.environ.update(environment)
        if inside is not None:
            Host.enter(inside)
        self._llm = open_engine(model, role, **more)
        self._handles: list[Any] = []
        self._gate: Gate | None = None

    def address(self) -> str:
        return address_of(self._llm)

    def close(self) -> None:
        self._llm.close()

    def submit(self, prompt: list[int], params: SamplingParams, carried: dict[str, Any]) -> None:
        self._handles.append(self._llm.submit(prompt, params, kv_transfer_params=carried))

    def result(self) -> tuple[list[int], int, dict[str, Any] | None]:
        output = self._handles.pop(0).result(60)
        return (
            list(output.output_token_ids),
            output.reused_store_tokens,
            output.kv_transfer_params,
        )

    def stop_at(self, layer_calls: int) -> None:
        self._gate = Gate(layer_calls)

    def wait_stopped(self) -> bool:
        assert self._gate is not None
        return self._gate.reached.wait(60)

    def go_on(self) -> None:
        assert self._gate is not None
        self._gate.open()

    def stats(self) -> Any:
        return self._llm.stats()

    def held(self) -> dict[str, int]:
        return held_by(self._llm)
