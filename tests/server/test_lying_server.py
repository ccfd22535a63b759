"""Commands at servers that are none of kvconnect's, or lie: a sentence, and nothing without end."""

from __future__ import annotations

import http.server
import io
import json
import threading

import pytest
from stored_blocks import prompt_chain

from kvconnect.cli.main import main
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.operations import remote
from kvconnect.operations.archive import ArchiveStream, ArchiveWriter
from kvconnect.operations.result import Exported, Saved

COUNTS = {"blocks": 1, "resumed": 0, "missing": 0, "missing_keys": 0, "unknown": 0}


class Liar(http.server.ThreadingHTTPServer):
    """Answers every request with `status`, `headers` and `body`."""

    status, body = 200, b""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.headers: dict[str, str] = {}
        self.asked = 0


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        liar = self.server
        liar.asked += 1
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(liar.status)
        for name, value in {**liar.headers, "Content-Length": str(len(liar.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(liar.body)

    do_POST = do_GET  # noqa: N815  the base class's

    def log_message(self, *_):
        pass


@pytest.fixture
def liar():
    with Liar() as one:
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield one
        one.shutdown()
        thread.join()


@pytest.fixture
def file(tmp_path):
    writer = ArchiveWriter(tmp_path / "sent.kv", b"")
    writer.end()
    writer.close()
    return tmp_path / "sent.kv"


def export(liar, path):
    done = Exported()
    remote.export_by_server(liar.url, {}, path, done, admin_key="k")
    return done


def calls(liar, file):
    return {
        "export": lambda: export(liar, file.with_name("got.kv")),
        "import": lambda: remote.import_by_server(liar.url, file, Saved(), admin_key="k"),
        "warm": lambda: remote.warm_by_server(liar.url, {}, Saved(), admin_key="k"),
    }


@pytest.mark.parametrize("verb", ["export", "import", "warm"])
@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (404, b"<html>", ConfigurationError),
        (301, b"", ConfigurationError),
        (400, b"[1]", ConfigurationError),
        (400, b'{"error": "x"}', ConfigurationError),
        (400, b'{"error": {}}', ConfigurationError),
        (502, b"<html>", BackendUnavailable),
        (200, b"", BackendUnavailable),
        (200, b"<html>", BackendUnavailable),
        (200, b"[1]", BackendUnavailable),
        (200, b"[" * 5000, BackendUnavailable),
        (200, b"data: 1\n\n", BackendUnavailable),
        (200, b'data: {"tokens": "x", "received": "x"}\n\n', BackendUnavailable),
        (200, b'data: {"tokens": 1, "blocks": []}\n\n', BackendUnavailable),
        (200, b'data: {"error": 1}\n\n', BackendUnavailable),
    ],
)
def test_an_answer_of_another_kind_of_server(liar, file, verb, status, body, error):
    liar.status, liar.body = status, body
    expected = f"answers with status {status}" if status != 200 else "answer"
    with pytest.raises(error, match=expected):
        calls(liar, file)[verb]()


@pytest.mark.parametrize(
    "counts", ["", "[1]", '{"blocks": 1}', json.dumps({**COUNTS, "blocks": []})]
)
def test_an_export_without_its_counts(liar, file, counts):
    liar.headers = {remote._COUNTS_HEADER: counts}
    with pytest.raises(BackendUnavailable, match="does not answer as a server of kvconnect"):
        calls(liar, file)["export"]()


def test_an_export_ends_with_the_blocks_that_were_said(liar, file):
    into = io.BytesIO()
    stream = ArchiveStream(into, b"")
    for block in prompt_chain([1, 2, 3, 4, 5, 6, 7, 8, 9]):
        stream.add(block)
    stream.end()
    liar.body, liar.headers = into.getvalue(), {remote._COUNTS_HEADER: json.dumps(COUNTS)}
    with pytest.raises(BackendUnavailable, match="more blocks than it announced"):
        calls(liar, file)["export"]()


def test_a_file_that_becomes_shorter_is_not_sent_for_ever(liar, file, monkeypatch):
    liar.body = b'{"received": 0}'
    plain = remote._Server.ask

    def ask(self, *arguments, **options):
        if liar.asked == 0:
            file.write_bytes(file.read_bytes() + bytes(1 << 20))
        elif liar.asked == 1:
            file.write_bytes(b"")
        return plain(self, *arguments, **options)

    monkeypatch.setattr(remote._Server, "ask", ask)
    monkeypatch.setattr(remote, "_PIECE_NBYTES", 1 << 18)
    with pytest.raises(ConfigurationError, match="became shorter while it was sent"):
        calls(liar, file)["import"]()
    assert liar.asked == 2


@pytest.mark.parametrize(
    "text",
    [
        'kvconnect_requests_total{engine="x"} NaN',
        'kvconnect_requests_total{engine="x"} +Inf',
        "kvconnect_requests_total 1\nkvconnect_prompt_tokens_total 3",
        "kvconnect_requests_total 1\nkvconnect_store_breaker_state 0",
    ],
)
def test_metrics_that_kvconnect_does_not_have(liar, text):
    liar.body = f"{text}\n".encode()
    with pytest.raises(BackendUnavailable, match="metrics that kvconnect does not have"):
        remote.server_overview(liar.url, api_key=None)


def test_no_answer_steers_the_terminal(liar, file, capsys):
    error = {"message": "\x1b[2Jgone\x07", "type": "invalid_request_error"}
    liar.status, liar.body = 400, json.dumps({"error": error}).encode()
    assert main(["import", liar.url, str(file)]) == 2
    assert capsys.readouterr().err.endswith("\ufffd[2Jgone\ufffd\n")


@pytest.mark.parametrize("name", [".", "/", "a-directory"])
def test_an_export_to_a_directory_is_refused_at_once(liar, tmp_path, monkeypatch, name, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-directory").mkdir()
    store = ["disk:kv?capacity=1MiB", "--all"]
    for where in ([liar.url, "--prompt", "x"], store):
        assert main(["export", *where, "-o", name]) == 2
        assert "is a directory; give the path of a file" in capsys.readouterr().err
    assert liar.asked == 0


@pytest.mark.parametrize("key", ["secret\nX: 1", "schlüssel"])
def test_a_key_that_cannot_be_sent_is_not_shown(liar, file, monkeypatch, key, capsys):
    monkeypatch.setenv("KVCONNECT_API_KEY", key)
    monkeypatch.setenv("KVCONNECT_ADMIN_KEY", key)
    for command in (["top", liar.url, "--json", "--once"], ["import", liar.url, str(file)]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "only printable ASCII" in error
        assert "X: 1" not in error
        assert "schl" not in error
    assert liar.asked == 0


@pytest.mark.parametrize("url", ["localhost:8000", "127.0.0.1:8000"])
def test_a_server_without_its_scheme(url, capsys):
    for more in ([], ["--json"]):
        assert main(["top", url, "--once", *more]) == 2
        assert f"give http://{url}" in capsys.readouterr().err
