"""The class ``tensorrt_llm.LLM``: kvconnect's engine with TensorRT-LLM's arguments and results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias, TypedDict, TypeVar, cast

from kvconnect.config import KvCacheRetentionConfig
from kvconnect.engine import llm as engine
from kvconnect.engine.request.prompts import one_each
from kvconnect.engine.request.tokenizer import Tokenizer
from kvconnect.errors import ConfigurationError, nearest
from kvconnect.integrations.trtllm_shim.output import RequestOutput, RequestResult
from kvconnect.integrations.trtllm_shim.sampling_params import SamplingParams
from kvconnect.integrations.trtllm_shim.settings import MAX_NUM_TOKENS, LlmOptions
from kvconnect.request import SamplingParams as EngineParams


class TokensPrompt(TypedDict, total=False):
    """A prompt by name: its text, or its token ids."""

    prompt: str
    prompt_token_ids: list[int]


PromptInputs: TypeAlias = str | list[int] | TokensPrompt
"""One prompt."""

Params: TypeAlias = SamplingParams | EngineParams
_T = TypeVar("_T")

_UNKNOWN = ("lora_request", "prompt_adapter_request", "disaggregated_params", "scheduling_params")
_IGNORED = ("use_tqdm", "streaming", "_postproc_params", "trace_headers", "priority")


class LLM:
    """A Hugging Face causal LM directory, served by one engine thread.

    Every method may be called from any thread. Call `shutdown`, or use it as a context manager.

    Args:
        model: directory of the model.
        tokenizer: ``None``, or the same directory: the model's own is used.
        options: by TensorRT-LLM's names; see `LlmOptions`.

    Raises:
        ConfigurationError: a setting is wrong or not possible here, the model cannot be loaded or
            served, the connector cannot be built. Nothing is left running.
    """

    def __init__(
        self, model: str | Path, tokenizer: str | Path | None = None, **options: Any
    ) -> None:
        chosen = LlmOptions(**options)
        if tokenizer is not None and Path(tokenizer) != Path(model):
            raise ConfigurationError(
                f"tokenizer: '{tokenizer}' is not possible; the model's own is used: leave it out"
            )
        more: dict[str, Any] = {}
        if chosen.max_batch_size is not None:
            more["max_batch_size"] = chosen.max_batch_size
        steps = MAX_NUM_TOKENS if chosen.max_num_tokens is None else chosen.max_num_tokens
        if chosen.scheduler_config is not None:
            more["scheduling"] = chosen.scheduler_config.capacity_scheduler_policy.value
        self._llm = engine.LLM(
            model,
            kv_cache=chosen.kv_cache_config,
            connector=chosen.kv_connector_config,
            dtype=chosen.dtype,
            max_num_tokens=steps,
            enable_chunked_prefill=bool(chosen.enable_chunked_prefill),
            tensor_parallel_size=chosen.tensor_parallel_size,
            **more,
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; ``None`` if its directory has none."""
        return self._llm.tokenizer

    def generate(
        self,
        inputs: PromptInputs | Sequence[PromptInputs],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        kv_cache_retention_config: KvCacheRetentionConfig
        | Sequence[KvCacheRetentionConfig | None]
        | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
        **more: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """Answers `inputs`; blocks until the last answer has ended.

        Args:
            inputs: one prompt, or a list of several: text, token ids, or a dict of one of them.
            sampling_params: one for all, or one each; ``None``: greedy, 32 tokens.
            kv_cache_retention_config: the priorities of blocks; one for all prompts, or one for
                each.
            cache_salt: requests share cached blocks only if their salts are equal; one for all
                prompts, or one for each.
            more: other arguments of TensorRT-LLM; refused if they would change answers.

        Returns:
            One output for one prompt, a list for a list.

        Raises:
            ConfigurationError: a prompt or a setting is wrong; nothing was started.
            EngineClosed: the engine takes no more requests.
        """
        _check("generate", more)
        alone = isinstance(inputs, (str, dict)) or _are_tokens(inputs)
        prompts = [inputs] if alone else list(inputs)
        count = len(prompts)
        given = [_prompt(cast("PromptInputs", one)) for one in prompts]
        params = one_each("sampling_params", _params(sampling_params), count)
        outputs = self._llm.generate(
            given,
            [_for_engine(one) for one in params],
            cache_salt=one_each("cache_salt", cache_salt, count),
            retention=one_each("kv_cache_retention_config", kv_cache_retention_config, count),
        )
        texts = [one if isinstance(one, str) else None for one in given]
        results = [RequestOutput.of(*pair) for pair in zip(outputs, texts, strict=True)]
        return results[0] if alone else results

    def generate_async(
        self,
        inputs: PromptInputs,
        sampling_params: Params | None = None,
        *,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
        cache_salt: str | None = None,
        **more: Any,
    ) -> RequestResult:
        """Starts one request and returns at once. Arguments and errors are those of `generate`."""
        _check("generate_async", more)
        prompt, params = _prompt(inputs), _for_engine(_params(sampling_params))
        handle = self._llm.submit(
            prompt,
            params,
            cache_salt=cache_salt,
            retention=kv_cache_retention_config,
        )
        return RequestResult(handle, prompt if isinstance(prompt, str) else None, params.n)

    def shutdown(self) -> None:
        """Aborts running requests and drains the connector; blocks until then. Idempotent."""
        self._llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _check(method: str, more: dict[str, Any]) -> None:
    for name, value in more.items():
        if name in _UNKNOWN and value is not None:
            raise ConfigurationError(
                f"{method}: {name}={value!r}: kvconnect's engine does not have it; leave it out"
            )
        if name not in _UNKNOWN + _IGNORED:
            known = (*_UNKNOWN, *_IGNORED, "kv_cache_retention_config", "cache_salt")
            raise ConfigurationError(f"{method}: unknown argument '{name}'; {nearest(name, known)}")


def _are_tokens(inputs: object) -> bool:
    return isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], int)


def _prompt(given: PromptInputs) -> str | list[int]:
    if not isinstance(given, dict):
        return given
    tokens = given.get("prompt_token_ids")
    found = given.get("prompt") if tokens is None else tokens
    if found is None:
        raise ConfigurationError(
            f"inputs: a dict with {sorted(given)} is no prompt; give 'prompt' or 'prompt_token_ids'"
        )
    return found


def _params(given: _T | None) -> _T | SamplingParams:
    return SamplingParams() if given is None else given


def _for_engine(params: object) -> EngineParams:
    if isinstance(params, EngineParams):
        return params
    if isinstance(params, SamplingParams):
        return params.for_engine()
    raise ConfigurationError(f"sampling_params: {params!r} is none; give SamplingParams(…)")
