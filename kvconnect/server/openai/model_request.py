"""A request to the served model of any kind, and the fields that no kind serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from kvconnect.errors import ConfigurationError
from kvconnect.settings import Settings
from kvconnect.text import shown

_AT_ONCE = 1 << 15  # the interpreter does nothing else meanwhile

_IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "parallel_tool_calls", "include_reasoning"),
    }
)
"""The fields that change no token."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # OpenAI's
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
    # vLLM's
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_content_format": ("auto", "string"),
    "documents": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "prompt_embeds": (),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}


class ModelRequest(Settings):
    """The field that all requests have.

    Attributes:
        model: name of the model; ``None``: the served one.
    """

    model: str | None = None

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """The fields that this kind does not serve, beside those that no kind serves."""

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Returns the request in `body`, a parsed JSON value.

        Raises:
            ConfigurationError: a field is unknown, wrong or not served.
        """
        return cls(**_without_unserved(body, cls.neutral))


def kinds_in(given: list[object]) -> set[type]:
    """Returns the types of the values in a list, which may be long."""
    found: set[type] = set()
    for start in range(0, len(given), _AT_ONCE):
        found.update(map(type, given[start : start + _AT_ONCE]))
    return found


def _without_unserved(
    body: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]]
) -> dict[str, Any]:
    """Returns the fields of `body` that are served.

    It leaves out ``null``, fields that change no token, and unserved fields with a neutral value.

    Args:
        body: parsed JSON.
        neutral: further fields that this kind does not serve, with the values that have no effect.

    Raises:
        ConfigurationError: `body` has a field that is not served.
    """
    unserved = {**_NEUTRAL, **neutral}
    fields = {}
    for name, value in body.items():
        if value is None or name in _IGNORED:
            continue
        if name not in unserved:
            fields[name] = value
        elif not any(_is(value, one) for one in unserved[name]):
            raise ConfigurationError(f"{name}: {shown(value)} is not served; leave it out")
    return fields


def _is(value: object, neutral: object) -> bool:
    """Returns whether they are the same JSON value; ``true`` is not 1."""
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    return value == neutral
