"""The file of the page, and the headers that keep it to itself."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import Response

__all__ = ["JSON_HEADERS", "document"]

_PARTS = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)

JSON_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
"""The headers of the answers that the page asks for."""


def document() -> Response:
    """Returns the page. A browser runs only its own script, and connects only to this server."""
    text, policy = _read()
    headers = JSON_HEADERS | {
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
