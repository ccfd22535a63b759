"""The HTTP client of the router for the servers behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import httpx2

from kvconnect.server.route.instance import Instance, InstanceFailed, Outcome
from kvconnect.server.route.settings import RouteSettings
from kvconnect.server.trust import ROUTER_SECRET_HEADER
from kvconnect.text import printable
from kvconnect.trace import warn_once

T = TypeVar("T")

_CONNECT_S = 2.0
_MAX_KEPT = 128
_TOLD_NBYTES = 500
_LATE_S = 0.5
"""The seconds by which a timeout must be late to show that this process was stopped."""
_LOOK_S = 0.25
"""The seconds between two checks of the clock that detect a stop of this process."""
_KEPT_S = 2.0
"""The seconds that an idle connection is kept.

Servers keep it longer, and so close none during a request."""

_CLIENTS_FAULT = frozenset({400, 404, 413, 415, 422})
_BUSY = frozenset({429, 503})
_OF_THE_ROUTER = frozenset({401, 403})


class ServerAnswered(Exception):
    """The refusal of a request that every server would refuse; the client gets it.

    Attributes:
        status: the status of HTTP.
        body: the body of the answer, unchanged.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.body = body


class InstanceClient:
    """Sends requests to servers; used by one event loop, and closed by its maker.

    Args:
        settings: the settings of the router.
    """

    def __init__(self, settings: RouteSettings) -> None:
        key, secret = settings.instance_api_key, settings.router_secret
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._secret = {} if secret is None else {ROUTER_SECRET_HEADER: secret}
        self._health_s = settings.health_timeout_s
        # The callers limit how long an answer may take.
        timeout = httpx2.Timeout(None, connect=_CONNECT_S)
        limits = httpx2.Limits(
            max_connections=None, max_keepalive_connections=_MAX_KEPT, keepalive_expiry=_KEPT_S
        )
        self._http = httpx2.AsyncClient(
            headers=self._headers, timeout=timeout, limits=limits, trust_env=False
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    @asynccontextmanager
    async def post(
        self,
        instance: Instance,
        path: str,
        body: bytes,
        *,
        transfers: bool,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> AsyncIterator[httpx2.Response]:
        """Yields the answer of `instance` with status 200, whose body is unread; leaving it aborts.

        Args:
            instance: the server.
            path: the path on the server.
            body: a JSON object.
            transfers: whether it has ``kv_transfer_params``, which a server takes only with the
                secret.
            headers: further ones.

        Raises:
            ServerAnswered: the request is wrong.
            InstanceFailed: another server may answer it.
        """
        sent = {**headers, "Content-Type": "application/json"}
        sent |= self._secret if transfers else {}
        try:
            answer = await self._sent(instance.url + path, body, sent)
            async with aclosing(answer):
                if answer.status_code != httpx2.codes.OK:
                    await self._refused(instance, answer)
                yield answer
        except httpx2.RequestError as error:
            if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)):
                instance.drains(f"cannot be connected to ({type(error).__name__})")
            raise InstanceFailed(instance, type(error).__name__, "failed") from error

    async def _sent(self, url: str, body: bytes, headers: Mapping[str, str]) -> httpx2.Response:
        """Returns the beginning of the answer; the caller closes its body."""
        loop = asyncio.get_running_loop()
        while True:
            request = self._http.build_request("POST", url, content=body, headers=headers)
            began = loop.time()
            try:
                return await self._http.send(request, stream=True)
            except httpx2.ConnectTimeout:
                # After a stop of this process, the timeout is no sign of the server's state.
                if loop.time() < began + _CONNECT_S + _LATE_S:
                    raise

    async def _refused(self, instance: Instance, answer: httpx2.Response) -> None:
        content = await answer.aread()
        if answer.status_code in _CLIENTS_FAULT:
            raise ServerAnswered(answer.status_code, content)
        if answer.status_code in _OF_THE_ROUTER:  # its API key, its secret, or a peer that it names
            said = printable(content[:_TOLD_NBYTES].decode(errors="replace"))
            warn_once(f"route.refused {instance.url}", f"{instance.name} ({instance.url}): {said}")
        outcome: Outcome = "busy" if answer.status_code in _BUSY else "failed"
        raise InstanceFailed(instance, f"status {answer.status_code}", outcome)

    async def get(self, instance: Instance, path: str) -> httpx2.Response:
        """Returns the answer of `instance` to a short request, within ``health_timeout_s``.

        Raises:
            httpx2.HTTPError: `instance` does not answer.
            TimeoutError: `instance` does not answer in time.
        """
        return await _within(self._health_s, self._http.get(instance.url + path, timeout=None))


async def _within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, or raises its error.

    Time in which this process was stopped is not counted, except a quarter of a second: answers
    that arrived meanwhile have not been read yet.

    Raises:
        TimeoutError: `work` took longer than `seconds`; it was cancelled and has ended.
    """
    task = asyncio.create_task(work)
    try:
        while seconds > 0:
            done, _ = await asyncio.wait({task}, timeout=min(seconds, _LOOK_S))
            if done:
                return task.result()
            seconds -= _LOOK_S
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    raise TimeoutError
