"""Prompts of random tokens."""

from __future__ import annotations

import numpy as np


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, num_tokens).tolist()
