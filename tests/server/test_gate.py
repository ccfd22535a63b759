"""Which key each path of a server needs."""

from __future__ import annotations

import pytest
from starlette.responses import Response

from kvconnect.server.http.gate import Gate
from kvconnect.server.settings import ServerSettings

ADMIN, METRICS, CLIENT = "of-the-admin", "of-prometheus", "of-clients"


async def status_of(gate: Gate, path: str, key: str | None, scheme: str = "Bearer ") -> int:
    found: list[int] = []

    async def send(message):
        if message["type"] == "http.response.start":
            found.append(message["status"])

    headers = [] if key is None else [(b"authorization", f"{scheme}{key}".encode("latin-1"))]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "query_string": b""}
    await gate(scope, lambda: None, send)
    return found[0]


def gate_with(**keys: str) -> Gate:
    settings = ServerSettings(model_names=("tiny",), **keys)
    return Gate(Response(), settings, settings.admin_key, settings.metrics_key)


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        ({}, {None, CLIENT, METRICS, ADMIN}),
        ({"api_key": CLIENT}, {CLIENT}),
        ({"api_key": CLIENT, "admin_key": ADMIN}, {ADMIN}),
        ({"api_key": CLIENT, "metrics_key": METRICS}, {METRICS}),
        ({"admin_key": ADMIN, "metrics_key": METRICS}, {ADMIN, METRICS}),
    ],
)
@pytest.mark.parametrize("path", ["/metrics", "/page/overview", "/page/listing", "/page/branches"])
async def test_metrics_and_the_page_are_for_their_own_key_or_the_admin_s(keys, taken, path):
    """They count exact tokens of all tenants, which no client may learn."""
    gate = gate_with(**keys)
    for key in (None, CLIENT, METRICS, ADMIN, "", "of-nobody"):
        expected = 200 if key in taken or not keys else 401
        assert await status_of(gate, path, key) == expected, key


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        ({"admin_key": ADMIN}, {None, CLIENT, ADMIN}),
        ({"api_key": CLIENT}, {CLIENT}),
        ({"api_key": CLIENT, "admin_key": ADMIN}, {CLIENT, ADMIN}),
    ],
)
async def test_a_page_without_an_engine_has_readers_and_no_clients(keys, taken):
    settings = ServerSettings(model_names=("tiny",), **keys)
    gate = Gate(Response(), settings, settings.admin_key, has_prompts=False)
    for key in (None, CLIENT, ADMIN, "of-nobody"):
        expected = 200 if key in taken or "api_key" not in keys else 401
        assert await status_of(gate, "/page/overview", key) == expected, key
    assert await status_of(gate, "/v1/cache/listing", CLIENT) != 200


async def test_the_metrics_key_opens_nothing_else():
    gate = gate_with(api_key=CLIENT, admin_key=ADMIN, metrics_key=METRICS)
    assert await status_of(gate, "/v1/cache/drop", METRICS) == 401
    assert await status_of(gate, "/v1/completions", METRICS) == 401
    assert await status_of(gate, "/health", METRICS) == 200


async def test_only_the_whole_key_opens_all_but_health():
    gate = gate_with(api_key=CLIENT)
    for path in ("/v1/completions", "/metrics", "/x"):
        for key in ("wrong", "", CLIENT[:-1], f"{CLIENT}s", "sécret", None):
            assert await status_of(gate, path, key) == 401
        for scheme in ("", "Basic ", "Bearer"):
            assert await status_of(gate, path, CLIENT, scheme) == 401
        # As HTTP has it, the name of the scheme is the same in any case.
        assert await status_of(gate, path, CLIENT, "bearer  ") == 200
    assert await status_of(gate, "/health", None) == 200


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        ({}, {None, CLIENT, ADMIN}),
        ({"api_key": CLIENT}, {CLIENT}),
        ({"admin_key": ADMIN}, {ADMIN}),
        ({"api_key": CLIENT, "admin_key": ADMIN}, {ADMIN}),
    ],
)
async def test_no_client_drops_the_cache_of_all_tenants_where_there_is_an_admin(keys, taken):
    for key in (None, CLIENT, ADMIN):
        expected = 200 if key in taken else 401
        assert await status_of(gate_with(**keys), "/reset_prefix_cache", key) == expected, key
