"""Sends one request to a prefill and a decode server, and waits until its answer begins."""

from __future__ import annotations

import asyncio
import logging
import uuid
from array import array
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
import jiter

from kvconnect.errors import ConfigurationError
from kvconnect.server.errors import Busy, RequestRefused
from kvconnect.server.openai.kv_transfer import KvTransferParams
from kvconnect.server.route.client import ServerAnswered
from kvconnect.server.route.fleet import Choice, Fleet
from kvconnect.server.route.instance import Address, Instance, InstanceFailed
from kvconnect.server.route.opened import Opened, begin
from kvconnect.server.route.prompt import Prompt
from kvconnect.server.route.routed import RoutedRequest
from kvconnect.trace import count

_log = logging.getLogger(__name__)

_GENERATING = (
    *("stream", "stream_options", "n", "min_tokens", "logprobs", "top_logprobs"),
    *("request_id", "return_token_ids"),
)
"""The fields that are not sent to a prefill server, which does not generate.

The length of the answer is sent, so that the server refuses a prompt that is too long for it, as
the decode server would."""
_LATE_ANSWER_S = 0.5
"""The seconds for a prefill server to report its end, once the answer has begun."""


class Handover:
    """Finds servers for one request, and retries on others until its answer begins.

    Each server is tried once. If no prefill server computes the prompt in time, the decode server
    computes it.

    Args:
        fleet: the fleet of the servers.
        request: that is to be answered.
        headers: that name its trace, for the servers.

    Attributes:
        until: the deadline of the whole answer, by the event loop's clock.
    """

    def __init__(self, fleet: Fleet, request: RoutedRequest, headers: Mapping[str, str]) -> None:
        now = asyncio.get_running_loop().time()
        self.until = now + fleet.settings.request_timeout_s
        self._prefill_until = min(self.until, now + fleet.settings.prefill_timeout_s)
        self._fleet = fleet
        self._request = request
        self._headers = headers
        self._prompt = request.prompt
        self._failed: dict[Instance, InstanceFailed] = {}

    @asynccontextmanager
    async def answer(self) -> AsyncIterator[Opened]:
        """Yields the answer from the first token on. Leaving the context aborts the remaining work.

        Raises:
            ServerAnswered: a server refused the request, as all others would.
            RequestRefused: no server answers (429, 503), or none in time (504).
        """
        self._prompt = await _with_tokens(self._request, self._fleet)
        while True:
            begun = False
            try:
                async with AsyncExitStack() as stack:
                    opened = await self._attempt(stack)
                    begun = True
                    count("route.decode.ok")
                    yield opened
                    return
            except InstanceFailed as failed:
                if begun:
                    raise
                self._note(failed)

    async def _attempt(self, stack: AsyncExitStack) -> Opened:
        decode = self._decode()
        prefill = self._prefill()
        stack.enter_context(decode.instance.loaded(decode.load, self._prompt.prefixes))
        if prefill is None:
            return await self._open(stack, decode.instance, None)
        address = prefill.instance.address
        # A decode server that still has the prompt answers without a prefill server.
        if address is not None and (self._fleet.settings.stream_layers or decode.holds):
            return await self._both(stack, prefill, decode.instance, address)
        carried = await self._compute(prefill, None)
        return await self._open(stack, decode.instance, carried)

    # ------------------------------------------------------------------ which servers

    def _prefill(self) -> Choice | None:
        if not self._fleet.prefill or not self._prompt.single:
            return None
        chosen = None
        if asyncio.get_running_loop().time() < self._prefill_until:
            chosen = self._fleet.choose("prefill", self._prompt, self._failed)
        if chosen is None:
            count("route.computed_by_decode")
        return chosen

    def _decode(self) -> Choice:
        chosen = None
        if asyncio.get_running_loop().time() < self.until:
            chosen = self._fleet.choose("decode", self._prompt, self._failed)
        if chosen is None:
            raise self._no_server()
        return chosen

    def _note(self, failed: InstanceFailed) -> None:
        instance = failed.instance
        self._failed[instance] = failed
        count(f"route.{instance.role}.{failed.outcome}")
        _log.info("%s (%s)", failed, instance.url)

    def _no_server(self) -> RequestRefused:
        """Returns the error for a request that no server answers; it shows no address."""
        failed = [one for one in self._failed.values() if one.instance.role == "decode"]
        if failed and all(one.outcome == "busy" for one in failed):
            return Busy("every decode server has as much to do as it takes; try again later")
        reasons = "; ".join(map(str, failed)) or "none is up"
        if asyncio.get_running_loop().time() >= self.until:
            return RequestRefused(504, f"no answer in time: {reasons}", "timeout")
        return RequestRefused(503, f"no decode server answers: {reasons}", "no_decode_server")

    # ------------------------------------------------------------------ what they do

    async def _compute(self, choice: Choice, transfer_id: str | None) -> dict[str, Any]:
        """Makes a prefill server compute the prompt; returns the parameters for a decode server.

        Raises:
            ServerAnswered: the request was refused, as on any server.
            InstanceFailed: the prompt was not computed.
        """
        instance = choice.instance
        params = {"do_remote_decode": True, "transfer_id": transfer_id}
        body = self._request.body(params, without=_GENERATING)
        with instance.loaded(choice.load, self._prompt.prefixes):
            async with (
                instance.answering(self._prefill_until),
                self._post(instance, body, transfers=True) as answer,
            ):
                content = await answer.aread()
        carried = _carried(instance, content)
        address = None
        if carried.remote_host is not None and carried.remote_port is not None:
            address = (carried.remote_host, carried.remote_port)
        instance.told(carried.remote_engine_id, address)
        count("route.prefill.ok")
        return carried.model_dump(exclude_none=True)

    async def _both(
        self, stack: AsyncExitStack, prefill: Choice, decode: Instance, address: Address
    ) -> Opened:
        """Sends the prompt to both at once, so that layers are fetched while others are computed.

        Once the answer has begun, the decode server has the whole prompt, perhaps from its own
        cache. Then the prefill server's remaining work is aborted.
        """
        transfer_id = uuid.uuid4().hex
        host, port = address
        carried = {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_host": host,
            "remote_port": port,
        }
        computing = asyncio.create_task(self._compute(prefill, transfer_id))
        opening = asyncio.create_task(self._open(stack, decode, carried))
        try:
            await asyncio.wait({computing, opening}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                computing.result()  # or the prefill server has ended
            opened = await opening
        except BaseException:
            await _end(computing, opening)
            raise
        stack.push_async_callback(_end, computing)
        asyncio.get_running_loop().call_later(_LATE_ANSWER_S, computing.cancel)
        return opened

    async def _open(
        self, stack: AsyncExitStack, instance: Instance, carried: dict[str, Any] | None
    ) -> Opened:
        """Returns the answer of `instance`, once it has begun.

        Raises:
            ServerAnswered: the request was refused, as on any server.
            InstanceFailed: the answer did not begin.
        """
        body = self._request.body(carried)
        async with instance.answering(self.until):
            post = self._post(instance, body, transfers=carried is not None)
            answer = await stack.enter_async_context(post)
            try:
                opened = await begin(instance, answer)
            except (httpx2.RequestError, ValueError) as error:
                raise InstanceFailed(instance, type(error).__name__, "failed") from error
        if opened.error_event:
            raise InstanceFailed(instance, "an error came before the first token", "failed")
        return opened

    def _post(
        self, instance: Instance, body: bytes, *, transfers: bool
    ) -> AbstractAsyncContextManager[httpx2.Response]:
        path, headers = self._request.path, self._headers
        return self._fleet.client.post(instance, path, body, headers=headers, transfers=transfers)


def _carried(instance: Instance, content: bytes) -> KvTransferParams:
    try:
        return KvTransferParams(**jiter.from_json(content)["kv_transfer_params"])
    except (ValueError, KeyError, TypeError, ConfigurationError) as error:
        raise InstanceFailed(
            instance, f"no kv_transfer_params in its answer of {len(content)} bytes", "failed"
        ) from error


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_TOKENIZE_S = 2.0
_TOKENIZED = frozenset(
    {
        *("model", "prompt", "messages", "add_special_tokens", "add_generation_prompt"),
        *("continue_final_message", "chat_template", "chat_template_kwargs", "tools", "documents"),
    }
)
"""The fields that determine the tokens."""


async def _with_tokens(request: RoutedRequest, fleet: Fleet) -> Prompt:
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
            fleet.client.post(server, "/tokenize", body, transfers=False) as answer,
        ):
            tokens = array("q", jiter.from_json(await answer.aread())["tokens"])
    except (
        *(InstanceFailed, ServerAnswered, TimeoutError, httpx2.HTTPError),
        *(ValueError, KeyError, TypeError, OverflowError),
    ):
        count("route.not_tokenized")
        return prompt
    return replace(prompt, tokens=tokens, _links={})
