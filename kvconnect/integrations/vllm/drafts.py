"""The draft models of speculative decoding: those that are refused, and their names in keys."""

from __future__ import annotations

from typing import Any

from kvconnect.errors import ConfigurationError
from kvconnect.integrations.core.models import digest_of_model, directory_of

_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "[ngram]")
_WITH_KV = ("eagle", "eagle3", "mtp", "draft_model")
# Tokens that these accept are the model's own, whatever was drafted.
_EXACT = ("standard", "block")


def refuse_drafts(speculative: Any) -> None:
    """Refuses ways to draft in which what is cached of a draft could change an answer.

    A block holds the keys and values of draft layers, too. Those of its last token depend on the
    token that follows, which is not in the block's key. So drafts may be worse than computed ones.

    Args:
        speculative: vLLM's ``SpeculativeConfig``, or ``None``.

    Raises:
        ConfigurationError: names the setting.
    """
    if speculative is None or speculative.method in _WITHOUT_KV:
        return
    if speculative.method not in _WITH_KV:
        raise ConfigurationError(
            f"speculative_config.method='{speculative.method}': what its draft model caches is not "
            f"described; KvConnect serves {', '.join(_WITH_KV)}, ngram and suffix"
        )
    method = str(getattr(speculative, "rejection_sample_method", "standard"))
    if method not in _EXACT:
        raise ConfigurationError(
            f"speculative_config.rejection_sample_method='{method}': accepts tokens that the model "
            "would not give, so that cached drafts would change answers; KvConnect serves "
            f"{' and '.join(_EXACT)}"
        )


def draft_variant(speculative: Any, *, since_ns: int | None) -> dict[str, str]:
    """Returns what names the draft layers in keys; empty if there are none.

    Args:
        speculative: vLLM's ``SpeculativeConfig``, or ``None``.
        since_ns: when vLLM may have begun to load the draft model; see `digest_of_model`.

    Raises:
        ConfigurationError: the directory of the draft model holds none.
        ModelChanged: the directory has changed since.
    """
    if speculative is None or speculative.method in _WITHOUT_KV:
        return {}
    model = speculative.draft_model_config
    directory = directory_of(model.model, revision=getattr(model, "revision", None), cache_dir=None)
    digest = digest_of_model(directory, since_ns=since_ns)
    return {"drafts": f"{speculative.method} {digest.hex()}"}
