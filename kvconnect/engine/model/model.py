"""A Hugging Face causal LM, loaded unmodified and served through the paged KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvconnect.engine.model.adapted import ADAPTED, adapt
from kvconnect.engine.model.declared import UNSERVED, checked_windows
from kvconnect.engine.model.forward_step import ForwardStep
from kvconnect.engine.model.indexers import INDEXED, pack_indexers
from kvconnect.engine.model.latents import keep_latents
from kvconnect.engine.model.lean_layers import make_lean
from kvconnect.engine.model.mixer_division import MixerDivision
from kvconnect.engine.model.mixer_probe import PROBED_TOKENS, MixerProbe, split_mixers
from kvconnect.engine.model.mixers import ModelCache
from kvconnect.engine.model.own_attention import (
    OWN_ATTENTION,
    PADDED,
    PagedCache,
    ProbedCache,
    num_layers,
    probed,
)
from kvconnect.engine.model.positions import position_limit
from kvconnect.engine.model.pretrained import load, load_config, unmap
from kvconnect.engine.model.seam import (
    ATTENTION,
    AttentionProbe,
    IndexedStep,
    LayerShape,
    running,
)
from kvconnect.engine.model.sharding import Division, ModelRanks, check_size, shard, tp_plan
from kvconnect.errors import ConfigurationError, UnsupportedModel

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
        owns_attention: true if the model computes attention itself; see `own_attention`.
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
        config = load_config(directory)
        _refuse(config)
        self.device = _device(device)
        self.owns_attention = config.model_type in OWN_ATTENTION
        self._model = load(directory, config, dtype)
        divided = Division()
        if ranks is not None:
            plan, num_heads = tp_plan(self._model), _num_heads(self._model)
            divided = shard(self._model, plan, ranks, num_heads=num_heads)
        self._model.to(self.device).eval()
        adapt(self._model)
        self.config = config
        self.dtype: torch.dtype = self._model.dtype
        self.vocab_size: int = self._model.get_input_embeddings().weight.shape[0]
        self.position_limit = limit = position_limit(config)
        self.eos_token_ids = _eos_token_ids(self._model)
        self._cache_name = _cache_name(self._model)
        self._masks = pack_indexers(self._model)
        probe, mixers = self._probe()
        longest = None if limit is None else limit.num_tokens
        windows = (
            None
            if self.owns_attention
            else checked_windows(self._model, longest=longest, by_mask=True)
        )
        if keep_latents(self._model):
            probe, mixers = self._probe()
        divided.check_whole(call.module for call in mixers.calls)
        self.layers = _windowed(probe.layers, windows or ())
        self.states = tuple(mixers.shapes.values())
        division = None if ranks is None else MixerDivision(mixers, ranks)
        self.stepped = split_mixers(mixers)
        self.divided_states = None if division is None else division.apply()
        self.whole_layers = [
            replace(layer, num_kv_heads=divided.heads.get(number, layer.num_kv_heads))
            if not layer.is_latent
            else layer  # whole on every rank
            for number, layer in zip(probe.numbers, self.layers, strict=True)
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
        if self.owns_attention:
            rows: dict[int, Tensor] = {}
            padded = self.config.model_type in PADDED
            for numbers, part in step.apart(padded=padded):
                rows.update(zip(numbers, self._computed_apart(part, len(numbers)), strict=True))
            return torch.cat([rows[number] for number in range(len(rows))])
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

    def _computed_apart(self, step: ForwardStep, count: int) -> Tensor:
        """Returns the logits of a part of a step, ``[count, rows, vocab]``; see `own_attention`."""
        positions = step.position_ids.view(count, -1)
        longest = int(positions[:, 0].max()) if count > 1 else step.start
        more: dict[str, Any] = {}
        if count > 1 and (positions != longest).any():
            places = torch.arange(longest + 1, device=self.device)
            more["attention_mask"] = (places >= longest - positions).long()
        logits = self._called(
            step.input_ids.view(count, -1),
            positions,
            step.last_tokens if count == 1 else step.last_tokens[:1],
            use_cache=True,
            past_key_values=PagedCache(step, len(self.layers), longest, step.states),
            **more,
        )
        step.check_complete()
        return logits

    def _called(
        self, input_ids: Tensor, position_ids: Tensor, wanted: Tensor, **more: Any
    ) -> Tensor:
        """Calls the model, with positions if it has an argument for them."""
        if self._takes("position_ids"):
            more["position_ids"] = position_ids
        if self._masks:
            more["attention_mask"] = self._masks
        chooses = self._takes("logits_to_keep")
        if chooses:
            more["logits_to_keep"] = wanted
        with torch.inference_mode():
            logits: Tensor = self._model(input_ids=input_ids, **more).logits
            return logits if chooses else logits[:, wanted]

    def _takes(self, argument: str) -> bool:
        return argument in inspect.signature(self._model.forward).parameters

    def _probe(self) -> tuple[AttentionProbe, MixerProbe]:
        name = type(self._model).__name__
        mixers = MixerProbe()
        recurrent = _is_recurrent(self._model)
        probe = AttentionProbe(mixers if recurrent else None)
        tokens = torch.arange(PROBED_TOKENS if recurrent else 1, device=self.device)[None]
        if self.owns_attention:
            own = self._probe_own(name)
            return own.stored, own
        states = mixers if recurrent else None
        try:
            with mixers.watching(self._model) if recurrent else nullcontext():
                self._computed(probe, tokens, tokens, states, tokens[0, :1])
        except TypeError as error:
            if "'kv'" not in str(error):
                raise
            raise UnsupportedModel(f"{name} does not hand kv= down to its attention") from error
        if probe.layers and not self._takes("position_ids"):
            raise UnsupportedModel(f"{name} takes no position_ids")
        self._check_layers(probe, mixers)
        return probe, mixers

    def _probe_own(self, name: str) -> ProbedCache:
        """Probes a model that computes attention itself."""

        def call(input_ids: Tensor, cache: ProbedCache) -> Tensor:
            tokens = torch.arange(input_ids.shape[1], device=self.device)
            with cache.watching(self._model):
                return self._called(
                    input_ids.to(self.device),
                    tokens[None],
                    tokens,
                    use_cache=True,
                    past_key_values=cache,
                )

        try:
            return probed(call, num_layers(self.config), name)
        except RuntimeError as error:
            if self.dtype != torch.float64:
                raise
            raise UnsupportedModel(f"{name} cannot compute in {self.dtype}: {error}") from error

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


def _refuse(config: PreTrainedConfig) -> None:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"model_type: '{config.model_type}' is no causal LM")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel("encoder-decoder models are not served")
    if reason := UNSERVED.get(config.model_type):
        raise UnsupportedModel(f"{model_class.__name__} is not served: {reason}")
    recurrent = getattr(model_class, "_is_stateful", False)  # its layers are probed instead
    if config.model_type in OWN_ATTENTION:
        return
    served = recurrent or config.model_type in _UNDECLARED or config.model_type in ADAPTED
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


def _windowed(layers: list[LayerShape], windows: Sequence[int | None]) -> list[LayerShape]:
    """Returns `layers` with the `windows` that only their masks have; see `checked_windows`.

    Layers that share a module count once among the `windows`, and have none.
    """
    if not any(windows):
        return layers
    windowed = list(layers)
    attending = [number for number, one in enumerate(layers) if not one.is_index]
    for number, window in zip(attending, windows, strict=True):
        if layers[number].window is None:
            windowed[number] = replace(layers[number], window=window)
    return windowed


def _is_recurrent(model: Any) -> bool:
    kinds = set(getattr(model.config, "layer_types", None) or ())
    return bool(getattr(model, "_is_stateful", False) or kinds & _RECURRENT_LAYERS)


def _cache_name(model: Any) -> str:
    """Returns the argument of `model` that is its cache."""
    names = inspect.signature(model.forward).parameters
    return next((one for one in ("cache_params", "state") if one in names), "past_key_values")


def check_sharing(directory: Path, size: int) -> None:
    """Checks that `size` ranks can share the model. Reads only its configuration.

    Raises:
        ConfigurationError: the directory is wrong.
        UnsupportedModel: the ranks cannot share it; names the sizes that work.
    """
    config = load_config(directory)
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
