"""Measures in decode steps the cost of `PromptCache`'s check of a model before a prompt."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

import torch

from kvconnect.bench.report import Figure
from kvconnect.bench.workload import random_prompt
from kvconnect.integrations.transformers import PromptCache
from kvconnect_bench.identity.plan import IdentityPlan
from kvconnect_bench.identity.weights import load, timed

_STEPS = 16


def canary(model: Path, plan: IdentityPlan) -> list[Figure]:
    """Times the check before a prefill against a decode step behind a prompt, in turns."""
    made = load(model, plan.dtype)
    ids = torch.from_numpy(random_prompt(plan.prompt_tokens, seed=1)).long()[None].to(made.device)
    checks, glances, steps = [], [], []
    with PromptCache(made, "memory:?capacity=64MiB") as prompts, torch.no_grad():
        guard = prompts.guard
        for _ in range(plan.repeats):
            past = made(ids, use_cache=True).past_key_values
            step = partial(made, ids[:, -1:], past_key_values=past, use_cache=True)
            for _ in range(_STEPS):
                steps.append(timed(step)[0])
                checks.append(timed(guard.check)[0])
                glances.append(timed(guard.glance)[0])
        if guard.doubt is not None:
            raise RuntimeError(f"the model changed while it was measured: {guard.doubt}")
    check, glance, decode = map(statistics.median, (checks, glances, steps))
    return [
        Figure("decode step", decode * 1e3, "ms"),
        Figure("canary and cheap checks", check * 1e3, "ms"),
        Figure("cheap checks", glance * 1e3, "ms"),
        Figure("per prefill / decode step", (check + glance) / decode, "x", "<= 1.5"),
    ]
