"""Changes of a loaded model, planted one by one and at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Change = Callable[[PreTrainedModel, random.Random], object]


def attention(model: PreTrainedModel, rng: random.Random) -> Any:
    return rng.choice(model.model.layers).self_attn


def weight(model: PreTrainedModel, rng: random.Random) -> nn.Parameter:
    """A weight that keys or values are made with."""
    part = attention(model, rng)
    return rng.choice([part.k_proj, part.v_proj]).weight


# ---------------------------------------------------------------------- weights


@torch.no_grad()
def write(model: PreTrainedModel, rng: random.Random) -> None:
    weight(model, rng).mul_(1.5)


def write_uncounted(model: PreTrainedModel, rng: random.Random) -> None:
    weight(model, rng).data.mul_(1.5)


def replace_memory(model: PreTrainedModel, rng: random.Random) -> None:
    changed = weight(model, rng)
    changed.data = changed.data * 1.5


@torch.no_grad()
def merge(model: PreTrainedModel, rng: random.Random) -> None:
    """As an adapter of rank 1 is merged."""
    changed = weight(model, rng)
    changed += torch.ones(changed.shape[0], 1) @ torch.ones(1, changed.shape[1]) / 4


def fused_step(model: PreTrainedModel, rng: random.Random) -> None:
    """Trainer's default optimizer, which writes past PyTorch's version counter."""
    step(model, fused=True)


def plain_step(model: PreTrainedModel, rng: random.Random) -> None:
    step(model, fused=False)


def step(model: PreTrainedModel, *, fused: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    optimizer.zero_grad()


def load_other(model: PreTrainedModel, rng: random.Random) -> None:
    model.load_state_dict({name: 1.2 * one for name, one in model.state_dict().items()})


def cast_to_and_fro(model: PreTrainedModel, rng: random.Random) -> None:
    model.bfloat16().double()


# ---------------------------------------------------------------------- what is not a weight


def change_buffer(model: PreTrainedModel, rng: random.Random) -> None:
    model.model.rotary_emb.inv_freq.data.mul_(0.5)


def change_setting(model: PreTrainedModel, rng: random.Random) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2


def add_hook(model: PreTrainedModel, rng: random.Random) -> None:
    part = attention(model, rng).v_proj
    part.register_forward_hook(lambda _module, _given, output: output * 1.5)


def patch_forward(model: PreTrainedModel, rng: random.Random) -> None:
    part = attention(model, rng).k_proj
    plain = part.forward
    part.forward = lambda given: plain(given) * 1.5


class Adapted(nn.Module):
    """A linear layer with a low-rank part beside it, as adapters are attached."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shape = base.out_features, base.in_features
        self.base = base
        self.added = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        self.on = True

    def forward(self, given: Tensor) -> Tensor:
        found = self.base(given)
        return found + nn.functional.linear(given, self.added) if self.on else found


def attach(model: PreTrainedModel, rng: random.Random) -> Adapted:
    part = attention(model, rng)
    part.v_proj = Adapted(part.v_proj, rng.randrange(100))
    return part.v_proj
