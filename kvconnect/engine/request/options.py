"""The options of a request besides its prompt and its sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from kvconnect.cache_options import CacheOptions
from kvconnect.config import KvCacheRetentionConfig


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of `LLM.submit`, which explains them."""

    cache_salt: str | None
    lora_id: int | str | None
    extra_key: str | int | None
    retention: KvCacheRetentionConfig | Mapping[str, object] | None
    kv_transfer_params: dict[str, Any] | None
    cache: CacheOptions | Mapping[str, object] | None
    trace_headers: Mapping[str, str] | None


class BatchOptions(TypedDict, total=False):
    """The keyword arguments of `LLM.generate`, which explains them."""

    cache_salt: str | Sequence[str | None] | None
    lora_id: int | str | None
    extra_key: str | int | None
    retention: (
        KvCacheRetentionConfig
        | Mapping[str, object]
        | Sequence[KvCacheRetentionConfig | Mapping[str, object] | None]
        | None
    )
    kv_transfer_params: dict[str, Any] | Sequence[dict[str, Any] | None] | None
    cache: (
        CacheOptions
        | Mapping[str, object]
        | Sequence[CacheOptions | Mapping[str, object] | None]
        | None
    )
    trace_headers: Mapping[str, str] | None


class ChatOptions(TypedDict, total=False):
    """The keyword arguments of `LLM.chat`; see `ChatFormat`."""

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, object]] | None
    chat_template_kwargs: Mapping[str, object] | None
