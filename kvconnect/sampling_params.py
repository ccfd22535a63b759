"""The settings of a request: how its tokens are sampled, and when generation stops."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, StrictBool, field_validator, model_validator

from kvconnect.settings import Settings


def _number(given: object) -> object:
    # Pydantic would take `True` for 1, and "1" as well.
    if isinstance(given, (bool, str)):
        raise ValueError("must be a number")  # noqa: TRY004  pydantic's kind
    return given


Integer = Annotated[int, BeforeValidator(_number)]
Real = Annotated[float, BeforeValidator(_number)]
Penalty = Annotated[Real, Field(ge=-2, le=2)]


class SamplingParams(Settings):
    """The settings of sampling and of when generation stops. Names and meanings are vLLM's.

    Attributes:
        n: completions of the one prompt; more than one need a temperature above 0.
        max_tokens: the most tokens to generate; 0: compute the prompt into the cache, and generate
            none.
        min_tokens: the fewest tokens to generate: before that no end token is sampled, and stop
            strings are ignored.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 or -1: all.
        top_p: keep the likeliest tokens that together reach this probability.
        min_p: keep tokens at least this many times as likely as the likeliest one; 0: all.
        seed: equal seeds give equal samples, whatever else runs in the batch; completion ``i`` of
            several draws with ``seed + i``. ``None`` or -1: a random seed.
        presence_penalty: -2 to 2; subtracted from the logit of each token that was generated
            before.
        frequency_penalty: -2 to 2; subtracted once for each time that the token was generated.
        repetition_penalty: above 0; divides the logit, or multiplies it where negative, of each
            token that is in the prompt or was generated.
        logprobs: the number of likeliest tokens whose log probabilities are returned, besides the
            chosen token's; 0: only that, -1: the whole vocabulary, ``None``: none. They are the
            model's, before penalties and temperature.
        prompt_logprobs: the same for the tokens of the prompt, from the second one on. The whole
            prompt is computed for it: nothing of it is taken from the cache or a store.
        stop: a string or several that end the text; the text excludes them.
        stop_token_ids: tokens that end generation, besides the model's own end tokens.
        ignore_eos: continue past the model's end-of-sequence tokens.
    """

    n: Annotated[Integer, Field(ge=1, le=16384)] = 1
    max_tokens: Annotated[Integer, Field(ge=0)] = 16
    min_tokens: Annotated[Integer, Field(ge=0)] = 0
    temperature: Annotated[Real, Field(ge=0, allow_inf_nan=False)] = 0.0
    top_k: Annotated[Integer, Field(ge=0)] = 0
    top_p: Annotated[Real, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[Real, Field(ge=0, le=1)] = 0.0
    seed: Integer | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[Real, Field(gt=0, allow_inf_nan=False)] = 1.0
    logprobs: Annotated[Integer, Field(ge=-1)] | None = None
    prompt_logprobs: Annotated[Integer, Field(ge=-1)] | None = None
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[Integer, ...] = ()
    ignore_eos: StrictBool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _several(cls, stop: Any) -> Any:
        if isinstance(stop, str):
            return (stop,)
        return () if stop is None else stop

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _none_is_empty(cls, token_ids: Any) -> Any:
        return () if token_ids is None else token_ids

    @field_validator("top_k", mode="before")
    @classmethod
    def _all(cls, top_k: Any) -> Any:
        return 0 if top_k == -1 else top_k

    @field_validator("seed", mode="before")
    @classmethod
    def _unseeded(cls, seed: Any) -> Any:
        return None if seed == -1 else seed

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}"
            )
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n={self.n} needs a temperature above 0: with temperature=0 all would be equal"
            )
        return self

    @property
    def adjusts_logits(self) -> bool:
        """Returns whether the tokens generated so far change the logits of the next one."""
        return (
            self.min_tokens > 0
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    def for_completion(self, index: int) -> SamplingParams:
        """Returns the parameters of completion `index` alone: with ``n`` 1 and a seed of its own.

        Only the first completion returns log probabilities of the prompt.
        """
        if self.n == 1:
            return self
        # Never -1, which means "no seed": seeds are taken modulo 2**63.
        seed = None if self.seed is None else (self.seed + index) % (1 << 63)
        of_prompt = self.prompt_logprobs if index == 0 else None
        return self.model_copy(update={"n": 1, "seed": seed, "prompt_logprobs": of_prompt})
