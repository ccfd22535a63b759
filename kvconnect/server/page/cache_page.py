"""The paths of the page, what they answer, and the server of the page of a store alone."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import re
from collections.abc import Awaitable, Callable
from functools import cache, partial
from importlib.resources import files
from typing import Self

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, Router

from kvconnect.errors import ConfigurationError
from kvconnect.operations.listed_store import ListedStore
from kvconnect.operations.prefix_tree import TreeRow
from kvconnect.operations.tenants import NO_SALT, TenantUse, tenant_of
from kvconnect.prometheus.overview import Overview
from kvconnect.server.admission import Admission
from kvconnect.server.errors import RequestRefused
from kvconnect.server.http.gate import ADMIN_PATHS, PAGE, Gate
from kvconnect.server.http.http_server import HttpServer
from kvconnect.server.http.listener import Listener
from kvconnect.server.page.history import History
from kvconnect.server.page.store_reader import StoreReader
from kvconnect.server.settings import HttpSettings, PageSettings

_ROWS = 50
"""The branches of one answer at most."""
_TENANTS = 100
"""The tenants of one answer at most."""
_MINUTE = 60.0

_Handler = Callable[[Request], Awaitable[Response]]


class CachePage:
    """The page over a store, or over a server and its store; a context manager, which ends both.

    Args:
        title: shown first.
        settings: of the server that answers.
        reader: of the store; ``None``: there is none. The page closes it.
        of_server: the numbers are those of this process, with the last hour; else those that the
            store reports.
    """

    def __init__(
        self, title: str, settings: HttpSettings, reader: StoreReader | None, *, of_server: bool
    ) -> None:
        self._title = title
        self._settings = settings
        self._reader = reader
        self._history = History() if of_server else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._history is not None:
            self._history.close()
        if self._reader is not None:
            self._reader.close()

    def routes(self) -> list[BaseRoute]:
        """Returns the paths: those of all clients, and those of the admin key."""
        answers: dict[str, _Handler] = {f"{PAGE}/overview": self._overview}
        for start, admin in ((f"{PAGE}/", False), (ADMIN_PATHS, True)):
            answers[f"{start}listing"] = partial(self._listing, admin)
            answers[f"{start}branches"] = partial(self._branches, admin)
        return [
            Route(PAGE, _document),
            *(Route(path, partial(self._checked, answer)) for path, answer in answers.items()),
        ]

    async def _checked(self, answer: _Handler, request: Request) -> Response:
        # Pages of other servers can ask, and not read the answer; nor should they cause a listing.
        if request.headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
            raise RequestRefused(403, "only this server's own page may ask", "foreign_page")
        if self._settings.api_key is None:
            check_host(request.headers.get("host", ""), self._settings.host)
        response = await answer(request)
        response.headers.update(_JSON_HEADERS)
        return response

    async def _overview(self, request: Request) -> Response:
        if self._history is not None:
            now = await asyncio.to_thread(Overview.now)
            history = self._history.samples()
        elif self._reader is not None:
            now, history = await self._reader.overview(), []
        else:
            now, history = Overview(), []
        return JSONResponse(
            {
                "title": self._title,
                "has_store": self._reader is not None,
                "overview": now.as_json(),
                "history": history,
            }
        )

    async def _listing(self, admin: bool, request: Request) -> Response:  # noqa: FBT001
        reader = self._opened()
        if request.query_params.get("fresh"):
            reader.refresh()
        state = "none" if reader.listed is None else "listed"
        if reader.error is not None and reader.listed is None:
            state = "failed"
        if reader.is_listing:
            state = "listing"
        told: dict[str, object] = {"state": state, "message": reader.error}
        told["num_listed"] = reader.num_listed
        told["fresh_in_s"] = reader.fresh_in_s
        if (listed := reader.listed) is not None:
            tenants = listed.tenants
            told |= {
                "listing": reader.number,
                "listed_at": listed.listed_at,
                "took_s": listed.took_s,
                "complete": listed.complete,
                "blocks": listed.tree.num_blocks,
                "tenants": [
                    _tenant(at, one, admin=admin) for at, one in enumerate(tenants[:_TENANTS])
                ],
                "more_tenants": max(0, len(tenants) - _TENANTS),
            }
        return JSONResponse(told)

    async def _branches(self, admin: bool, request: Request) -> Response:  # noqa: FBT001
        reader = self._opened()
        listed, number = reader.listed, _number(request, "listing")
        if listed is None or number != reader.number:
            raise RequestRefused(
                409, "the store was listed again; begin at its first level", "listing_replaced"
            )
        node = _number(request, "node") if "node" in request.query_params else None
        if node is not None and node >= len(listed.tree):
            raise RequestRefused(404, f"node: {node} is none of this listing", "unknown_node")
        found = listed.tree.rows(node, _number(request, "start"), _ROWS)
        rows = [_row(listed, row) for row in found.rows]
        if admin:
            texts = await reader.texts(listed, found.rows)
            for shown, row, (tokens, text) in zip(rows, found.rows, texts, strict=True):
                shown.update(_secrets(listed, row), token_ids=tokens, text=text)
        return JSONResponse({"rows": rows, "more": found.more})

    def _opened(self) -> StoreReader:
        if self._reader is None:
            raise ConfigurationError("this server has no store (--store)")
        return self._reader


def check_host(given: str, own: str) -> None:
    """Checks that a browser meant this machine, and not a name that now leads to it.

    Raises:
        RequestRefused: `given`, the header ``Host``, is neither an address, nor ``localhost``, nor
            the server's `own` name. The page of another name could read the answer.
    """
    name = given.rpartition(":")[0] if not given.endswith("]") and ":" in given else given
    name = name.strip("[]").lower().rstrip(".")
    if name in {"localhost", own.lower()}:
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        raise RequestRefused(
            403,
            "Host: give this machine's address or 'localhost', or start the server with an API key",
            "foreign_host",
        ) from None


async def _document(request: Request) -> Response:
    return _page()


def _number(request: Request, name: str) -> int:
    """Returns a parameter of the query that is a whole number, 0 without it."""
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise RequestRefused(400, f"{name}: '{text[:20]}' is no whole number", "bad_number")
    return int(text)


def _tenant(at: int, use: TenantUse, *, admin: bool) -> dict[str, object]:
    """Returns the use of the tenant at `at` in the list; without the admin key no digest."""
    told = use.as_json()
    if not admin:
        told["digest"] = None
        if use.name != NO_SALT:
            told["name"] = None
    return {"tenant": at + 1, "known": use.digest is not None, **told}


def _row(listed: ListedStore, row: TreeRow) -> dict[str, object]:
    """Returns what may be shown of a branch without the admin key: no tokens, times in minutes."""
    return {
        "node": row.node,
        "tenant": listed.tenant_numbers[tenant_of(row.space.namespace)],
        "model": row.space.model.hex()[:16],
        "group": row.space.group,
        "run_blocks": row.run_blocks,
        "blocks": row.blocks,
        "bytes": row.bytes,
        "hits": row.hits,
        "pinned_blocks": row.pinned_blocks,
        "created_at": row.created_at // _MINUTE * _MINUTE,
        "used_at": row.used_at // _MINUTE * _MINUTE,
        "branches": row.branches,
    }


def _secrets(listed: ListedStore, row: TreeRow) -> dict[str, object]:
    """Returns what only the holder of the admin key may know of a branch."""
    keys = listed.tree.keys_of(row.node, 1)
    return {
        "key": keys[0].hex() if keys else None,
        "namespace": row.space.namespace[:32].hex(),
        "tokens": row.tokens,
        "run_tokens": row.run_tokens,
        "created_at": row.created_at,
        "used_at": row.used_at,
    }


_PARTS = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)

_JSON_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
"""The headers of the answers that the page asks for."""


def _page() -> Response:
    """Returns the page. A browser runs only its own script, and connects only to this server."""
    text, policy = _read()
    headers = _JSON_HEADERS | {
        "Content-Security-Policy": policy,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
    }
    return Response(text, media_type="text/html; charset=utf-8", headers=headers)


@cache
def _read() -> tuple[str, str]:
    text = (files("kvconnect.server.page") / "page.html").read_text(encoding="utf-8")
    found = {kind: f"'sha256-{_hash(content)}'" for kind, content in _PARTS.findall(text)}
    policy = (
        f"default-src 'none'; script-src {found['script']}; style-src {found['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        # No text becomes markup, whatever the script does.
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return text, policy


def _hash(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def serve_page(
    title: str,
    reader: StoreReader,
    settings: PageSettings,
    listener: Listener,
    ready: Callable[[], None],
) -> None:
    """Answers until SIGTERM or Ctrl-C, in the main thread; blocks.

    `listener` is closed when this returns, and so is `reader`. `ready` is called once browsers may
    connect.

    Raises:
        ConfigurationError: the port was taken meanwhile.
    """
    with CachePage(title, settings, reader, of_server=False) as page:
        router = Router(page.routes(), redirect_slashes=False)
        app = Gate(router, settings, settings.admin_key, has_prompts=False)
        admission = Admission(1, settings.max_bodies_bytes)
        HttpServer(app, settings, admission, ready).answer(listener)
