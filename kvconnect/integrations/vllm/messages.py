"""The messages between the scheduler's half and the workers' in a step. Picklable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvconnect.connector.pair.messages import OffloadMeta, WorkerMeta
from kvconnect.integrations.vllm.weights import WeightChange, WeightsMeta


@dataclass(frozen=True, slots=True)
class StepMeta:
    """The instructions for the workers.

    Attributes:
        offload: loads and saves, as the pair orders them.
        names: vLLM's ids of the requests in `offload` that will be reported, by the pair's ids.
        cancelled: loads without a waiting request.
        preempted: requests whose blocks are freed before this step computes, and their valid
            tokens.
        is_idle: the step computes nothing.
        weights: the scheduler's record of the name of the model's weights in keys.
    """

    offload: OffloadMeta | None = None
    names: Mapping[int, str] = field(default_factory=dict)
    cancelled: tuple[int, ...] = ()
    preempted: tuple[tuple[int, int], ...] = ()
    is_idle: bool = False
    weights: WeightsMeta = field(default_factory=WeightsMeta)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The reports of workers to the scheduler; vLLM joins those of all ranks with `aggregate`.

    Attributes:
        ranks: the messages of all ranks that have one.
        failed: for requests whose load failed, leading tokens that are valid nevertheless.
        change: the change of the weights, since they were named.
    """

    ranks: tuple[WorkerMeta, ...] = ()
    failed: Mapping[int, int] = field(default_factory=dict)
    change: WeightChange | None = None

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Returns both reports. A load that failed on several ranks is valid as far as on all."""
        failed = dict(self.failed)
        for request_id, valid in other.failed.items():
            failed[request_id] = min(valid, failed.get(request_id, valid))
        changes = [one for one in (self.change, other.change) if one is not None]
        # A change found after something was computed has precedence.
        changes.sort(key=lambda change: change.num_resets is not None)
        change = changes[0] if changes else None
        return WorkerReport((*self.ranks, *other.ranks), failed, change)
