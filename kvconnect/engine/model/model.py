"""A Hugging Face causal LM, loaded unmodified and served through the paged KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvconnect.config import torch_dtype
from kvconnect.engine.model.declared import checked_windows
from kvconnect.engine.model.forward_step import ForwardStep
from kvconnect.engine.model.indexers import INDEXED, pack_indexers
from kvconnect.engine.model.latents import keep_latents
from kvconnect.engine.model.lean_layers import make_lean
from kvconnect.engine.model.mixer_division import MixerDivision
from kvconnect.engine.model.mixer_probe import PROBED_TOKENS, MixerProbe, split_mixers
from kvconnect.engine.model.mixers import ModelCache
from kvconnect.engine.model.own_attention import (
    OWN_ATTENTION,
    num_layers,
    paged_cache,
    stored_layers,
)
from kvconnect.engine.model.positions import position_limit
from kvconnect.engine.model.rank_sizes import check_size, tp_plan
from kvconnect.engine.model.seam import ATTENTION, AttentionProbe, IndexedStep, running
from kvconnect.engine.model.sharding import Division, ModelRanks, shard
from kvconnect.engine.model.unmapping import unmap
from kvconnect.errors import ConfigurationError, UnsupportedModel

__all__ = ["Model", "check_sharing"]

_RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_STATELESS_LAYERS = {"moe", "mlp"}
_SERVED_LAYERS = {"full_attention", "sliding_attention"} | _RECURRENT_LAYERS | _STATELESS_LAYERS
_UNSERVED_LAYERS = {
    "indexed_attention": "an index chooses the tokens that are attended to",
    "compressed_sparse_attention": "a key is made of several tokens and of those before them",
    "heavily_compressed_attention": "a key is made of tokens of several blocks, which are stored "
    "before it is known",
    "chunked_attention": "a token sees its own chunk only",
}
"""The reason why layers of a type are not served."""
_UNDECLARED = {"biogpt", "stablelm"}
"""Families that have the attention interface, and do not declare it."""


class Model:
    """The loaded model, and its properties for the engine.

    Args:
        directory: the directory of the model.
        dtype: the dtype of weights and KV; ``auto``: the checkpoint's.
        device: ``auto``: CUDA where there is one.
        ranks: the ranks that share the model, of which this rank's part is loaded; ``None``: the
            whole model is loaded.

    Attributes:
        layers: the shape of what each attention layer stores on this rank.
        whole_layers: the same for all ranks together; heads that several ranks hold count once.
        vocab_size: token ids are below it.
        position_limit: the longest sequence; ``None``: none is known.
        eos_token_ids: tokens that end a generation.
        states: the states that recurrent layers keep for each sequence; empty: there are none.
        divided_states: the part of `states` that this rank has; ``None``: all.
        stepped: true if some of these layers cannot continue from a state with several tokens, so
            that chunks after a sequence's first one are computed token by token.

    Raises:
        ConfigurationError: the directory, dtype or device is wrong.
        UnsupportedModel: the model cannot be served; the message is the reason.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        ranks: ModelRanks | None = None,
    ) -> None:
        config = _load_config(directory)
        _refuse(config)
        self.device = _device(device)
        self._owns_attention = config.model_type in OWN_ATTENTION
        self._model = _load(directory, config, dtype)
        divided = Division()
        if ranks is not None:
            plan, num_heads = tp_plan(self._model), _num_heads(self._model)
            divided = shard(self._model, plan, ranks, num_heads=num_heads)
        self._model.to(self.device).eval()
        self.config = config
        self.dtype: torch.dtype = self._model.dtype
        self.vocab_size: int = self._model.get_input_embeddings().weight.shape[0]
        self.position_limit = limit = position_limit(config)
        self.eos_token_ids = _eos_token_ids(self._model)
        self._cache_name = _cache_name(self._model)
        self._masks = pack_indexers(self._model)
        probe, mixers = self._probe()
        if not self._owns_attention:
            checked_windows(self._model, longest=None if limit is None else limit.num_tokens)
        if keep_latents(self._model):
            probe, mixers = self._probe()
        divided.check_whole(call.module for call in mixers.calls)
        self.layers = probe.layers
        self.states = tuple(mixers.shapes.values())
        division = None if ranks is None else MixerDivision(mixers, ranks)
        self.stepped = split_mixers(mixers)
        self.divided_states = None if division is None else division.apply()
        self.whole_layers = [
            replace(layer, num_kv_heads=divided.heads.get(number, layer.num_kv_heads))
            if not layer.is_latent
            else layer  # whole on every rank
            for number, layer in zip(probe.numbers, probe.layers, strict=True)
        ]
        self._leads = ranks is None or ranks.rank == 0
        if self.device.type == "cpu" and ranks is None and not self.states:
            make_lean(self._model)
        unmap(self._model)  # last, because packed weights are no copy of a file any more

    def forward(self, step: ForwardStep) -> Tensor:
        """Computes `step` and writes its KV into the pools.

        Returns:
            Logits after each sequence's last token and its drafts, ``[rows, vocab]``; on ranks
            that follow none, ``[0, vocab]``.
        """
        if self._owns_attention:
            return torch.cat([self._computed_alone(one) for one in step.apart()])
        wanted = step.last_tokens if self._leads else step.last_tokens[:0]
        logits = self._computed(step, step.input_ids, step.position_ids, step.states, wanted)
        step.check_complete()
        return logits[0]

    def _computed(
        self,
        kv: IndexedStep,
        input_ids: Tensor,
        position_ids: Tensor,
        states: ModelCache | None,
        wanted: Tensor,
    ) -> Tensor:
        """Runs the model, with states if it has some."""
        more: dict[str, Any] = {} if states is None else {self._cache_name: states}
        before = running.set(kv)
        try:
            return self._called(input_ids, position_ids, wanted, use_cache=False, kv=kv, **more)
        finally:
            running.reset(before)

    def _computed_alone(self, step: ForwardStep) -> Tensor:
        """Returns the logits of a step of one sequence, ``[rows, vocab]``; see `own_attention`."""
        cache = paged_cache(step, len(self.layers), step.start)
        logits = self._called(
            step.input_ids,
            step.position_ids,
            step.last_tokens,
            use_cache=True,
            past_key_values=cache,
        )
        step.check_complete()
        return logits[0]

    def _called(
        self, input_ids: Tensor, position_ids: Tensor, wanted: Tensor, **more: Any
    ) -> Tensor:
        """Calls the model, with positions if it has an argument for them."""
        if self._takes_positions:
            more["position_ids"] = position_ids
        if self._masks:
            more["attention_mask"] = self._masks
        with torch.inference_mode():
            output = self._model(input_ids=input_ids, logits_to_keep=wanted, **more)
        logits: Tensor = output.logits
        return logits

    @property
    def _takes_positions(self) -> bool:
        return "position_ids" in inspect.signature(self._model.forward).parameters

    def _probe(self) -> tuple[AttentionProbe, MixerProbe]:
        name = type(self._model).__name__
        mixers = MixerProbe()
        recurrent = _is_recurrent(self._model)
        probe = AttentionProbe(mixers if recurrent else None)
        if "logits_to_keep" not in inspect.signature(self._model.forward).parameters:
            raise UnsupportedModel(f"{name} takes no position_ids or no logits_to_keep")
        tokens = torch.arange(PROBED_TOKENS if recurrent else 1, device=self.device)[None]
        if self._owns_attention:
            call = partial(self._called, tokens, tokens, tokens[0, :1], use_cache=True)
            probe.layers = stored_layers(call, num_layers(self.config), name)
            probe.numbers = list(range(len(probe.layers)))
            return probe, mixers
        states = mixers if recurrent else None
        try:
            with mixers.watching(self._model) if recurrent else nullcontext():
                self._computed(probe, tokens, tokens, states, tokens[0, :1])
        except TypeError as error:
            if "'kv'" not in str(error):
                raise
            raise UnsupportedModel(f"{name} does not hand kv= down to its attention") from error
        if probe.layers and not self._takes_positions:
            raise UnsupportedModel(f"{name} takes no position_ids or no logits_to_keep")
        self._check_layers(probe, mixers)
        return probe, mixers

    def _check_layers(self, probe: AttentionProbe, mixers: MixerProbe) -> None:
        """Refuses a model with a layer that neither attends nor keeps a state where we see it."""
        name = type(self._model).__name__
        kinds = getattr(self.config, "layer_types", None) or []
        expected = getattr(self.config, "num_hidden_layers", None)
        pairs = zip(probe.numbers, probe.layers, strict=True)
        attending = [(number, layer) for number, layer in pairs if not layer.is_index]
        seen = {*probe.numbers, *(key.layer_idx for key in mixers.shapes)}
        seen |= {index for index, kind in enumerate(kinds) if kind in _STATELESS_LAYERS}
        if mixers.shapes or (expected is not None and _is_recurrent(self._model)):
            if hidden := sorted(set(range(expected or 0)) - seen):
                raise UnsupportedModel(
                    f"layers {', '.join(map(str, hidden))} of {name} neither use transformers' "
                    "attention interface nor keep their states in its cache"
                )
        elif not attending or (expected is not None and len(attending) != expected):
            raise UnsupportedModel(
                f"{len(attending)} of {expected} layers of {name} use "
                "transformers' attention interface; all must"
            )
        for number, layer in attending:
            kind = kinds[number] if number < len(kinds) else None
            windowed = kind in {"sliding_attention", "hybrid_sliding"}
            if kind is not None and windowed != (layer.window is not None):
                raise UnsupportedModel(
                    f"layer {number} is configured as {kind} but attends with window {layer.window}"
                )


def _load_config(directory: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model: '{directory}' cannot be loaded: {error}") from error
    return config


def _refuse(config: PreTrainedConfig) -> None:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"model_type: '{config.model_type}' is no causal LM")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel("encoder-decoder models are not served")
    recurrent = getattr(model_class, "_is_stateful", False)  # its layers are probed instead
    if config.model_type in OWN_ATTENTION:
        return
    served = recurrent or config.model_type in _UNDECLARED
    if not served and not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{model_class.__name__} has no attention interface")
    unknown = set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYERS
    if config.model_type in INDEXED:
        unknown -= {"indexed_attention"}
    if unknown:
        reasons = sorted({_UNSERVED_LAYERS[one] for one in unknown if one in _UNSERVED_LAYERS})
        why = f": {'; '.join(reasons)}" if reasons else ""
        raise UnsupportedModel(f"layers of type {', '.join(sorted(unknown))} are not served{why}")
    if getattr(config, "attention_chunk_size", None):
        raise UnsupportedModel("chunked attention (attention_chunk_size) is not served")


def _is_recurrent(model: Any) -> bool:
    kinds = set(getattr(model.config, "layer_types", None) or ())
    return bool(getattr(model, "_is_stateful", False) or kinds & _RECURRENT_LAYERS)


def _cache_name(model: Any) -> str:
    """Returns the argument of `model` that is its cache."""
    names = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in names else "past_key_values"


def _load(directory: Path, config: PreTrainedConfig, dtype: str) -> Any:  # a PreTrainedModel
    wanted = dtype if dtype == "auto" else torch_dtype(dtype)
    # Grouped matrix products of experts do not exist in float64.
    resolved = getattr(config, "dtype", None) if dtype == "auto" else wanted
    experts = {"experts_implementation": "eager"} if resolved == torch.float64 else {}
    try:
        with _no_thread_of_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=wanted,
                attn_implementation=None if config.model_type in OWN_ATTENTION else ATTENTION,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **experts,
            )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model: '{directory}' cannot be loaded: {error}") from error
    model, info = loaded
    # Missing weights are random and differ between processes, which no digest shows.
    if missing := sorted(info["missing_keys"]):
        raise ConfigurationError(
            f"model: '{directory}' has no weights of {', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}: it is incomplete, or of another architecture"
        )
    return model


@contextmanager
def _no_thread_of_progress_bars() -> Iterator[None]:
    """Keeps tqdm from starting its thread, which redraws bars that stand still.

    The thread ends with the interpreter wherever it is. If it holds tqdm's lock then, the end of
    the process waits for that lock for ever.
    """
    before, tqdm.monitor_interval = tqdm.monitor_interval, 0
    try:
        yield
    finally:
        tqdm.monitor_interval = before


def check_sharing(directory: Path, size: int) -> None:
    """Checks that `size` ranks can share the model. Reads only its configuration.

    Raises:
        ConfigurationError: the directory is wrong.
        UnsupportedModel: the ranks cannot share it; names the sizes that work.
    """
    config = _load_config(directory)
    _refuse(config)
    if config.model_type in OWN_ATTENTION:
        raise UnsupportedModel(
            "tensor_parallel_size: ranks do not divide models that compute attention themselves; "
            "use 1"
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=ATTENTION
        )
    check_size(model, tp_plan(model), size, num_heads=_num_heads(model))


def _num_heads(model: Any) -> int:
    """Returns the query heads of a layer; 0: no layer attends."""
    try:
        return int(getattr(model.config.get_text_config(), "num_attention_heads", 0))
    except RuntimeError as error:  # the configuration has a number for each layer
        raise UnsupportedModel(
            "tensor_parallel_size: layers may differ in their number of attention heads; use 1"
        ) from error


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"device: '{name}' is unknown; use cpu, cuda, cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device: '{name}' is not available; give cpu or auto")
    return device


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    given = getattr(model.generation_config, "eos_token_id", None)
    if given is None:
        given = getattr(model.config, "eos_token_id", None)
    if given is None:
        return frozenset()
    return frozenset(given) if isinstance(given, (list, tuple)) else frozenset({given})
