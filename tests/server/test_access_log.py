"""The access log: a line for each answer, of what may be read by whoever reads logs."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import httpx2
import pytest
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route, Router

from kvconnect.cli.main import JsonLines, TextLines
from kvconnect.server.http.gate import Gate
from kvconnect.server.settings import HttpSettings

LOGGER = "kvconnect.access"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What the access log writes, as JSON lines."""
    logger, text = logging.getLogger(LOGGER), io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonLines())
    level = logger.level
    logger.addHandler(handler)
    yield text
    logger.removeHandler(handler)
    logger.setLevel(level)


async def fails(request):
    raise RuntimeError("planted")


async def parts(request):
    async def body():
        yield b"one"
        yield b"two"

    return StreamingResponse(body())


async def asked(path, *, settings, headers=None):
    routes = [
        Route("/fine", lambda request: PlainTextResponse("fine")),
        Route("/fails", fails),
        Route("/parts", parts),
    ]
    gate = Gate(Router(routes), settings)
    transport = httpx2.ASGITransport(gate, client=("10.0.0.9", 1234))
    async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.get(path, headers=headers)


@pytest.mark.parametrize(
    ("path", "status"), [("/fine", 200), ("/parts", 200), ("/fails", 500), ("/absent", 404)]
)
async def test_an_answer_is_a_line(lines, path, status):
    await asked(f"{path}?secret=sesame", settings=HttpSettings(access_log=True))
    (line,) = [json.loads(one) for one in lines.getvalue().splitlines()]
    assert line["logger"] == LOGGER
    assert line["level"] == "INFO"
    assert (line["client"], line["method"]) == ("10.0.0.9", "GET")
    assert (line["path"], line["status"]) == (path, status)
    assert line["elapsed_s"] >= 0
    assert line["message"].startswith(f"10.0.0.9 'GET' '{path}' {status} ")
    assert "sesame" not in lines.getvalue()


async def test_a_wrong_key_is_a_line_without_the_key(lines):
    settings = HttpSettings(access_log=True, api_key="right")
    answer = await asked("/fine", settings=settings, headers={"Authorization": "Bearer sesame"})
    assert answer.status_code == 401
    assert json.loads(lines.getvalue())["status"] == 401
    assert "sesame" not in lines.getvalue()


async def test_a_path_cannot_make_a_line_of_its_own(lines):
    await asked("/x%0Akvconnect:%20WARNING", settings=HttpSettings(access_log=True))
    assert len(lines.getvalue().splitlines()) == 1
    assert "\n" not in json.loads(lines.getvalue())["message"]


async def test_without_the_setting_nothing_is_logged(lines):
    await asked("/fine", settings=HttpSettings(access_log=True))
    before = lines.getvalue()
    await asked("/fine", settings=HttpSettings())
    assert lines.getvalue() == before


def record(name, message, *args, error=None):
    info = None if error is None else (type(error), error, None)
    return logging.LogRecord(name, logging.WARNING, "file", 1, message, args, info)


def test_json_lines_have_what_text_lines_have():
    made = record("kvconnect", "lost %d", 3, error=ValueError("planted"))
    line = json.loads(JsonLines().format(made))
    assert line.keys() == {"time", "level", "logger", "message", "traceback"}
    assert line["message"] == "lost 3"
    assert "planted" in line["traceback"]
    assert line["time"].endswith("+00:00")
    assert TextLines().format(record("kvconnect", "lost %d", 3)) == "kvconnect: WARNING: lost 3"


@pytest.mark.parametrize("form", [JsonLines(), TextLines()])
def test_passwords_that_other_packages_log_are_hidden(form):
    line = form.format(record("botocore", "connecting to redis://u:sesame@host/0"))
    assert "sesame" not in line
    assert "redis://" in line
