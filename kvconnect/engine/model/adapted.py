"""Gives models that were written before them transformers' interfaces of attention and of states.

Each of these models computes as its own code does. Only what its code keeps elsewhere, or does not
keep at all, comes from the engine: keys and values through the attention interface, states through
the interface of transformers' cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvconnect.engine.model.seam import ATTENTION


def adapt(model: Any) -> None:
    """Replaces methods of the modules of `model`, if its family is one of `ADAPTED`."""
    adapter = ADAPTED.get(model.config.model_type)
    if adapter is not None:
        adapter(model)


def _adapt_gpt(model: Any) -> None:
    """Computes the attention of OpenAI's first GPT over the engine's cache: it has none."""
    for number, block in enumerate(model.transformer.h):
        block.attn.layer_idx = number
        block.attn._attn = MethodType(_attend, block.attn)  # noqa: SLF001


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> list[Tensor]:
    """Computes attention of ``[1, heads, n, dim]``; the keys are transposed."""
    scaling = value.shape[-1] ** -0.5 if module.scale else 1.0
    attention = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    out, _ = attention(module, query, key.transpose(2, 3), value, None, scaling=scaling)
    return [out.transpose(1, 2)]


def _adapt_recurrent_gemma(model: Any) -> None:
    """Moves the states of Recurrent Gemma, which are attributes of its modules, to the cache."""
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.temporal_block, "rg_lru"):
            layer.temporal_block.layer_idx = number
            layer.temporal_block.forward = MethodType(_recur, layer.temporal_block)


def _recur(module: Any, *args: Any, past_key_values: Any, use_cache: bool, **named: Any) -> Any:
    if past_key_values is None:
        return type(module).forward(module, *args, use_cache=use_cache, **named)
    before = [past_key_values.get_recurrent_state(module.layer_idx, one) for one in range(2)]
    module.conv1d_state, module.rg_lru.recurrent_states = before
    out = type(module).forward(module, *args, use_cache=True, **named)
    after = module.conv1d_state, module.rg_lru.recurrent_states
    module.conv1d_state = module.rg_lru.recurrent_states = None
    for number, state in enumerate(after):
        past_key_values.update_recurrent_state(state, module.layer_idx, number)
    return out


def _adapt_rwkv(model: Any) -> None:
    """Hands the engine's states down to the modules of RWKV.

    They take the states of all layers in five tensors, ``[batch, size, layers]``.
    """
    for number, block in enumerate(model.rwkv.blocks):
        for module, kinds in ((block.attention, (1, 2, 3, 4)), (block.feed_forward, (0,))):
            module.layer_id = 0  # each gets tensors of one layer
            module.forward = MethodType(_mixing(number, kinds), module)


def _mixing(layer_idx: int, kinds: tuple[int, ...]) -> Callable[..., Any]:
    """Returns `forward` of a module that keeps the states `kinds` of a layer."""

    def forward(module: nn.Module, hidden: Tensor, state: Any = None, **named: Any) -> Any:
        if state is None:
            return type(module).forward(module, hidden, **named)
        before = {kind: state.get_recurrent_state(layer_idx, kind) for kind in kinds}
        outputs, after = [], []
        for row in range(len(hidden)):  # its code adds up the rows of a batch of single tokens
            five = [hidden.new_zeros(1, hidden.shape[2], 1) for _ in range(5)]
            for kind in kinds:
                if (found := before[kind]) is not None:
                    five[kind] = found[row : row + 1, :, None].clone()
                elif kind > 1:
                    five[kind] = five[kind].float() - (1e30 if kind == 4 else 0.0)
            out, _ = type(module).forward(module, hidden[row : row + 1], state=five, **named)
            outputs.append(out)
            after.append(five)
        for kind in kinds:
            new = torch.cat([five[kind][:, :, 0] for five in after])
            state.update_recurrent_state(new, layer_idx, kind)
        return torch.cat(outputs), state

    return forward


class _LayerStates:
    """Stands for the cache of xLSTM: each of its layers gets the engine's states."""

    def __init__(self, states: Any, num_layers: int) -> None:
        self.rnn_state = [states] * num_layers

    def __bool__(self) -> bool:
        return False  # or the model would copy the states of each layer itself


def _adapt_xlstm(model: Any) -> None:
    """Hands the engine's states down to the layers of xLSTM, which has a cache of its own."""
    model.config.max_inference_chunksize = sys.maxsize  # the engine divides prompts
    backbone = model.backbone
    backbone.forward = MethodType(_handing_down, backbone)
    for number, block in enumerate(backbone.blocks):
        block.mlstm_layer.layer_idx = number
        block.mlstm_layer.forward = MethodType(_remember, block.mlstm_layer)


def _handing_down(module: Any, *args: Any, cache_params: Any = None, **named: Any) -> Any:
    states = None if cache_params is None else _LayerStates(cache_params, len(module.blocks))
    return type(module).forward(module, *args, cache_params=states, **named)


def _remember(module: Any, x: Tensor, state: Any = None) -> Any:
    if state is None:
        return type(module).forward(module, x)
    before = [state.get_recurrent_state(module.layer_idx, one) for one in range(3)]
    y, after = type(module).forward(module, x, None if before[0] is None else tuple(before))
    for number, new in enumerate(after):
        state.update_recurrent_state(new.to(x.dtype), module.layer_idx, number)
    return y, state


ADAPTED: Mapping[str, Callable[[Any], None]] = {
    "openai-gpt": _adapt_gpt,
    "recurrent_gemma": _adapt_recurrent_gemma,
    "rwkv": _adapt_rwkv,
    "xlstm": _adapt_xlstm,
}
"""The function that adapts the models of a family."""
