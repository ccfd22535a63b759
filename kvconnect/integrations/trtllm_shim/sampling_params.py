"""The sampling parameters of TensorRT-LLM, translated to kvconnect's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvconnect.errors import ConfigurationError
from kvconnect.request import SamplingParams as EngineParams

_TRANSLATED = {"end_id", "stop", "stop_token_ids", "temperature", "top_k", "top_p", "min_p"}
_SAME = {"max_tokens", "min_tokens", "n", "repetition_penalty", "seed", "ignore_eos", "logprobs"}
_WITHOUT_EFFECT = {"pad_id", "exclude_input_from_output", "return_perf_metrics"}
_GENERATED_ONLY = "TensorRT-LLM also counts the tokens of the prompt, kvconnect's engine does not"
_OTHER_MEANING = {
    "presence_penalty": _GENERATED_ONLY,
    "frequency_penalty": _GENERATED_ONLY,
    "prompt_logprobs": (
        "in TensorRT-LLM those of the token behind each token of the prompt, in kvconnect's engine "
        "its own"
    ),
}
"""The parameters that kvconnect's engine has by these names, but with another meaning."""


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """The parameters for choosing tokens and for the end of generation, as in TensorRT-LLM.

    Names and defaults are TensorRT-LLM's. Without temperature, `top_k` and `top_p` decoding is
    greedy, unless `min_p` is given. `for_engine` refuses values that kvconnect's engine does not
    support, or understands otherwise.
    """

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: Sequence[str] | str | None = None
    bad_token_ids: Sequence[int] | None = None
    stop: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: object = None
    logits_processor: object = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    return_perf_metrics: bool = False
    exclude_input_from_output: bool = True
    guided_decoding: object = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def for_engine(self) -> EngineParams:
        """Returns kvconnect's parameters that mean the same.

        Raises:
            ConfigurationError: a value is wrong, or the engine does not support it.
        """
        values: dict[str, Any] = {"max_tokens": self.max_tokens, **self._chosen(), **self._stops()}
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in _TRANSLATED | _WITHOUT_EFFECT or value == field.default:
                continue
            if name in _SAME:
                values[name] = value
            elif not self._is_neutral(name, value):
                why = _OTHER_MEANING.get(name, "kvconnect's engine does not have it")
                raise ConfigurationError(
                    f"SamplingParams.{name}={value!r}: {why}; leave it at {field.default!r}"
                )
        return EngineParams(**values)

    def _is_neutral(self, name: str, value: object) -> bool:
        """Returns whether `value` of the parameter `name` means the same as not to give it."""
        return value == self.n if name == "best_of" else name in _OTHER_MEANING and not value

    def _chosen(self) -> dict[str, Any]:
        min_p = self.min_p or 0.0
        given = (self.temperature, self.top_k, self.top_p)
        if (
            (given == (None, None, None) and not min_p)
            or 0 in {self.temperature, self.top_p}
            or 1 in {self.top_k, min_p}
        ):
            return {"temperature": 0.0}
        return {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_k": self.top_k or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "min_p": min_p,
        }

    def _stops(self) -> dict[str, Any]:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        token_ids = tuple(self.stop_token_ids or ())
        if self.end_id == -1:  # no token has this id: the generation ends by its length
            return {"stop": stop, "stop_token_ids": token_ids, "ignore_eos": True}
        if self.end_id is not None:
            token_ids += (self.end_id,)
        return {"stop": stop, "stop_token_ids": token_ids}
