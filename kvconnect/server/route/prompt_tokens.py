"""Requests the tokens of a prompt from a server, if servers publish events."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace

import httpx2

from kvconnect.server.route.client import InstanceClient, ServerAnswered
from kvconnect.server.route.fleet import Fleet
from kvconnect.server.route.instance import InstanceFailed
from kvconnect.server.route.prompt import Prompt
from kvconnect.server.route.routed import RoutedRequest
from kvconnect.trace import count

__all__ = ["with_tokens"]

_TOKENIZE_S = 2.0
_TOKENIZED = frozenset(
    {
        *("model", "prompt", "messages", "add_special_tokens", "add_generation_prompt"),
        *("continue_final_message", "chat_template", "chat_template_kwargs", "tools", "documents"),
    }
)
"""The fields that determine the tokens."""


async def with_tokens(request: RoutedRequest, fleet: Fleet, client: InstanceClient) -> Prompt:
    """Returns the prompt of `request` with its tokens, if any server publishes events.

    A server that is up tokenizes text, within 2 s. Without tokens, the choice of a server is based
    on estimates. A prompt of less than one piece is not sent.
    """
    prompt = request.prompt
    able = [one for one in fleet if one.down is None and one.held is not None]
    if prompt.tokens is not None or not (prompt.prefixes and prompt.single and able):
        return prompt
    server = min(able, key=lambda one: one.running)
    body = request.body(without=request.fields.keys() - _TOKENIZED)
    try:
        async with (
            asyncio.timeout(_TOKENIZE_S),
            client.post(server, "/tokenize", body, transfers=False) as answer,
        ):
            await answer.aread()
            tokens = array("q", answer.json()["tokens"])
    except (
        *(InstanceFailed, ServerAnswered, TimeoutError, httpx2.HTTPError),
        *(ValueError, KeyError, TypeError, OverflowError),
    ):
        count("route.not_tokenized")
        return prompt
    return replace(prompt, tokens=tokens, _links={})
