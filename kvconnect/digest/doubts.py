"""The reasons for which a computation gets no keys, so that it is neither loaded nor saved."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from kvconnect.trace import count, warn_once


class Doubt(StrEnum):
    """A reason for which no key identifies a computation. Its value is the metric's label.

    Attributes:
        sentence: the reason in words, without a full stop. It completes "not cached: …".
    """

    sentence: str

    def __new__(cls, code: str, sentence: str) -> Self:
        """Makes the member with the label `code`."""
        made = str.__new__(cls, code)
        made._value_ = code
        made.sentence = sentence
        return made

    # The model, and the files it was loaded from.
    WEIGHTS_FROM_ELSEWHERE = (
        "weights_from_elsewhere",
        "the weights are not those of the model's directory",
    )
    WEIGHTS_CHANGED = "weights_changed", "the model's weights were changed since they were named"
    SETTINGS_CHANGED = (
        "settings_changed",
        "the model's configuration was changed since it was named",
    )
    MODULES_CHANGED = (
        "modules_changed",
        "a module of the model was replaced, patched or hooked since it was named",
    )
    TRAINING = "training", "the model is in training mode, where dropout makes passes differ"
    CANARY = "canary", "the model no longer computes what it computed when it was named"
    CANARY_UNSTABLE = "canary_unstable", "the model does not compute the same twice"
    ADAPTER_UNKNOWN = "adapter_unknown", "the content of the request's adapter is not known"
    ADAPTER_MIXED = (
        "adapter_mixed",
        "the engine computes requests without an adapter with those of others",
    )

    # The computation of a pass.
    BIDIRECTIONAL = "bidirectional", "the model's attention also looks ahead"
    WINDOW_UNSEEN = "window_unseen", "a window of the configuration is not passed to attention"
    TOO_LONG = "too_long", "the prompt is longer than the positions that keys can name"
    EMBEDDINGS = "embeddings", "embeddings were given instead of tokens"
    MASK = "mask", "the attention mask is more than padding on the left"
    PADDED_STATES = (
        "padded_states",
        "the prompts of a batch differ in length, and the model has recurrent layers",
    )
    POSITION_IDS = "position_ids", "positions of the caller's own were given"
    OTHER_INPUTS = "other_inputs", "inputs beside tokens were given that keys do not name"
    FOREIGN_PASS = "foreign_pass", "something other than the model's own passes wrote to the cache"
    OTHER_TOKENS = "other_tokens", "other tokens are computed than prefill() was given"

    # The inputs of a request.
    USER_IDENTIFIER = (
        "user_identifier",
        "an input has an identifier of the user's, which says nothing of its content",
    )
    CONTENT_UNKNOWN = "content_unknown", "the content of a picture, sound or video is not known"
    SLOW_CONTENT = "slow_content", "its adapter, or its pictures, take long to read"
    STREAMING = "streaming", "streaming input takes tokens back"
    BAD_TOKENS = "bad_tokens", "its tokens cannot be converted"
    BAD_SALT = "bad_salt", "its salt is not one that keys can hold"
    UNKNOWN_INPUT = "unknown_input", "the engine says something of it that kvconnect does not know"

    # Ranks and runtimes.
    REQUEST_RESET = "request_reset", "the engine reset it while it ran"
    STORE_CLOSED = "store_closed", "its store is closed"


def note_doubt(doubt: Doubt, detail: str = "") -> str:
    """Counts a computation that is not cached, and logs the reason once.

    Counts ``engine.request.uncached`` with the label ``reason``. Never raises.

    Args:
        doubt: the reason.
        detail: further words, such as a tensor's name. Each pair of `doubt` and `detail` is logged
            once, so `detail` must not contain what clients send.

    Returns:
        The reason as a sentence, with `detail`.
    """
    sentence = f"{doubt.sentence}: {detail}" if detail else doubt.sentence
    count("engine.request.uncached", (("reason", doubt.value),))
    warn_once(f"doubt.{doubt.value} {detail}", f"not cached: {sentence}")
    return sentence
