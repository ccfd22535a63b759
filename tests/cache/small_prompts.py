"""Prompts of a few tokens, as requests and as chains of keys."""

from __future__ import annotations

import numpy as np

from kvconnect.keys import BlockKey, KeyChain
from kvconnect.request import LlmRequest, SamplingParams
from kvconnect.tokens import TokenBuffer

ROOT = BlockKey(bytes(32))


def chain_of(tokens, size, root=ROOT):
    return KeyChain(root, size, TokenBuffer(np.array(tokens, np.int32)))


def request_of(number, tokens, size, **params):
    return LlmRequest(
        number,
        np.array(tokens, np.int32),
        chain_root=ROOT,
        tokens_per_block=size,
        sampling_params=SamplingParams(**params),
    )
