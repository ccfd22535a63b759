"""The verbs ``warm``, ``export`` and ``import`` by a running server over HTTP; its numbers."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any, BinaryIO, Self
from urllib.parse import urlsplit

from kvconnect.errors import (
    BackendUnavailable,
    BadFrame,
    ConfigurationError,
    KvConnectError,
    MissingExtra,
    RetryLater,
)
from kvconnect.operations.archive import ArchiveReader, ArchiveWriter, file_key, part_of
from kvconnect.operations.export import SHORT_KEY_NBYTES
from kvconnect.operations.progress import Progress
from kvconnect.operations.result import Exported, Saved
from kvconnect.prometheus.overview import Overview
from kvconnect.redaction import without_passwords

_TIMEOUT_S = 60.0
"""An answer has an event each second."""
_TURN_S = 600.0
"""The time until an export begins: verbs take turns, and it lists the store first."""
_PIECE_NBYTES = 1 << 20
_COUNTS_HEADER = "kvconnect-counts"
_BINARY = "application/octet-stream"
_LONGEST_TEXT = 1 << 20
"""The bytes of an answer, or of an event, that are read."""

_METRICS_TIMEOUT_S = 10.0
_MOST_METRICS = 64 << 20

_OURS = {
    *("invalid_request_error", "authentication_error", "permission_denied_error"),
    "not_found_error",
}
"""The types of errors that the sender of a request can correct."""


def warm_by_server(
    server: str, body: Mapping[str, object], done: Saved, *, admin_key: str | None
) -> None:
    """Makes the server compute and save the blocks of prompts that its store lacks.

    Blocks until it is done. Leaving it, by an interruption, ends the work of the server.

    Args:
        server: its URL, as ``http://host:8000``.
        body: ``prompts``, ``messages``, ``salt`` and ``lora``, as of `Which`.
        done: its counts are those that the server reports meanwhile.
        admin_key: the admin key of the server.

    Raises:
        ConfigurationError: a bad URL or key, or a request that the server refuses.
        BackendUnavailable: the server cannot be reached, or fails.
    """
    with _Server(server, admin_key) as one, Progress("warm", 0, "tokens") as progress:
        one.perform("warm", body, done, progress)


def export_by_server(
    server: str,
    body: Mapping[str, object],
    path: Path,
    done: Exported,
    *,
    admin_key: str | None,
    key_file: str | None = None,
) -> None:
    """Writes blocks of the server's store to the file `path`, as `PromptStore.export` does.

    After an interruption it continues the file ``PATH.part``, if all of its blocks are wanted.

    Args:
        server: its URL, as ``http://host:8000``.
        body: the blocks, as of `Which`.
        path: of the file.
        done: its counts grow meanwhile. A server does not say which blocks it left out because
            they are bad and which because its store dropped them: they are `bad`.
        admin_key: of the server.
        key_file: a secret that authenticates the file; the server does not get it.

    Raises:
        ConfigurationError: a bad URL or key, a request that the server refuses, or a file that
            cannot be written.
        BackendUnavailable: the server cannot be reached, or fails; repeat it.
        BadFrame: the file is complete but for blocks that were left out.
    """
    part = part_of(path)
    writer = ArchiveWriter(part, file_key(key_file))
    try:
        before = len(writer.keys)
        if not _export_more(server, body, writer, done, admin_key):
            writer.restart()
            _export_more(server, body, writer, done, admin_key)
        else:
            done.resumed = before
        if not writer.keys:
            part.unlink()
            if done.bad:
                raise RetryLater("all wanted blocks were dropped or are bad; no file is made")
        else:
            done.blocks = len(writer.keys)
            done.tokens = sum(one.tokens for one in writer.finish(path).models.values())
    finally:
        writer.close()
    done.complete = True
    if done.bad:
        raise BadFrame(f"{done.bad} blocks are bad or were dropped meanwhile, and were left out")


def _export_more(
    server: str,
    body: Mapping[str, object],
    writer: ArchiveWriter,
    done: Exported,
    admin_key: str | None,
) -> bool:
    """Adds what `writer` lacks; returns False if it has blocks that are not wanted."""
    had, asked = len(writer.keys), dict(body)
    with _Server(server, admin_key) as one:
        if had:
            skip = b"".join(sorted(key[:SHORT_KEY_NBYTES] for key in writer.keys))
            asked["skip"] = name = hashlib.blake2b(skip, digest_size=16).hexdigest()
            one.send(name, io.BytesIO(skip))
        answer = one.ask("POST", "export", json.dumps(asked).encode(), timeout_s=_TURN_S)
        counts = _object(answer.headers.get(_COUNTS_HEADER, ""))
        if _number(counts, "resumed") != had:
            return False
        wanted = _number(counts, "blocks")
        done.missing, done.missing_keys, done.unknown = (
            _number(counts, name) for name in ("missing", "missing_keys", "unknown")
        )
        done.opened = True
        with Progress("export", wanted, "blocks") as progress:
            try:
                for block in ArchiveReader(server, b"", io.BufferedReader(answer)).blocks():
                    if len(writer.keys) == had + wanted:
                        raise BackendUnavailable(f"{one.url}: sends more blocks than it announced")
                    writer.add(block)
                    done.blocks += 1
                    done.bytes += block.data.numel()
                    progress.advance(1)
            except BadFrame as error:  # cut, or changed on the way
                raise BackendUnavailable(f"{error}: repeat the call: it continues") from error
            finally:
                writer.flush()
    done.bad = had + wanted - len(writer.keys)
    return True


def import_by_server(server: str, path: Path, done: Saved, *, admin_key: str | None) -> None:
    """Makes the server save the blocks of the file `path`, after it has checked all of it.

    The file is sent in pieces; after an interruption the rest of it is.

    Args:
        server: its URL, as ``http://host:8000``.
        path: of a file of ``export`` without a key.
        done: its counts are those that the server reports meanwhile.
        admin_key: of the server.

    Raises:
        BadFrame: it is no such file.
        ConfigurationError: a bad URL or key, a file with a key, or one that the server refuses.
        BackendUnavailable: the server cannot be reached, or fails; repeat it.
    """
    with ArchiveReader(path, None) as reader:
        name = reader.id
    with _Server(server, admin_key) as one, path.open("rb") as file:
        one.send(name, file)
        with Progress("import", 0, "blocks") as progress:
            one.perform("import", {"file": name}, done, progress)


class _Server:
    """A connection to a server. Errors of HTTP within the context become `BackendUnavailable`."""

    def __init__(self, url: str, key: str | None) -> None:
        self._connection, self._base = _connection(url)
        self.url = without_passwords(url)
        self._key = _bearer(key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._connection.close()
        known = isinstance(error, KvConnectError)
        if not known and isinstance(error, (HTTPException, OSError, ValueError)):
            raise BackendUnavailable(f"{self.url}: {error}") from error

    def ask(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        *,
        kind: str = "application/json",
        timeout_s: float = _TIMEOUT_S,
    ) -> HTTPResponse:
        """Returns the answer to a request about ``/v1/cache/TARGET``, whose body is to be read.

        Raises:
            ConfigurationError, BackendUnavailable: the server refused it, or failed.
        """
        path = f"/v1/cache/{target}"
        answer = self.request(method, path, body, kind=kind, timeout_s=timeout_s)
        if answer.status != 200:
            raise _error(self.url, answer.status, answer.read(_LONGEST_TEXT))
        return answer

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        kind: str = "application/json",
        timeout_s: float,
    ) -> HTTPResponse:
        """Returns the answer of any status to a request; its body is to be read."""
        self._connection.timeout = timeout_s
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        headers = {"Content-Type": kind, **self._key}
        self._connection.request(method, self._base + path, body, headers)
        return self._connection.getresponse()

    def number(self, name: str, answer: HTTPResponse) -> int:
        """Returns the number `name` in the body of `answer`."""
        return _number(_object(answer.read(_LONGEST_TEXT)), name)

    def send(self, name: str, file: BinaryIO) -> None:
        """Sends what the server lacks of `file`, a piece at a time, under `name`."""
        at = self.number("received", self.ask("GET", f"import/{name}"))
        nbytes = file.seek(0, io.SEEK_END)
        at = at if at <= nbytes else 0
        with Progress("send", nbytes - at, "bytes") as progress:
            while at < nbytes:
                file.seek(at)
                if not (piece := file.read(_PIECE_NBYTES)):
                    raise ConfigurationError("the file became shorter while it was sent")
                answer = self.ask("POST", f"import/{name}?offset={at}", piece, kind=_BINARY)
                progress.advance(self.number("received", answer) - at)
                at += len(piece)

    def perform(
        self, verb: str, body: Mapping[str, object], done: Saved, progress: Progress
    ) -> None:
        """Makes the server perform `verb`, and copies its counts to `done` meanwhile."""
        answer = self.ask("POST", verb, json.dumps({**body, "stream": True}).encode())
        for text in _events(answer):
            event = _object(text)
            if "error" in event:
                raise _error(self.url, answer.status, text)
            progress.advance(_number(event, "tokens") - done.tokens)
            for field in fields(done):
                if field.name in event:
                    setattr(done, field.name, _number(event, field.name))
            done.opened = True


def server_overview(server: str, *, api_key: str | None) -> Overview:
    """Reads the metrics of a server, or of another process that answers Prometheus; blocks.

    Args:
        server: its URL, as ``http://host:8000``; ``/metrics`` at its end may be left out.
        api_key: of the server.

    Raises:
        ConfigurationError: a bad URL or key, or a server without kvconnect's metrics.
        BackendUnavailable: the server cannot be reached, or fails.
        MissingExtra: prometheus-client is not installed.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise MissingExtra("reading a server's metrics", "top") from error
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    with _Server(server, api_key) as one:
        server = one.url
        with one.request("GET", "/metrics", timeout_s=_METRICS_TIMEOUT_S) as answer:
            content = answer.read(_MOST_METRICS)
        if answer.status != 200:
            raise _refusal(server, answer.status)
        for family in text_string_to_metric_families(content.decode()):
            for sample in family.samples:
                if sample.name.startswith("kvconnect_"):
                    samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    if "kvconnect_requests_total" not in samples:
        raise ConfigurationError(f"{server}: answers without metrics of kvconnect")
    try:
        return Overview.of(samples, samples["kvconnect_requests_total"][0][0].get("engine", ""))
    except (LookupError, OverflowError, ValueError) as error:
        raise BackendUnavailable(
            f"{server}: metrics that kvconnect does not have: {error!r}"
        ) from error


def _connection(server: str) -> tuple[HTTPConnection, str]:
    """Returns a connection to `server` that is not open yet, and what its paths begin with."""
    try:
        parts = urlsplit(server)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        shown = without_passwords(server)
        raise ConfigurationError(f"server: '{shown}' is no URL; give one as http://host:8000")
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    base = parts.path.rstrip("/").removesuffix("/v1").removesuffix("/metrics")
    return kind(parts.hostname, port, timeout=_TIMEOUT_S), base


def _bearer(key: str | None) -> dict[str, str]:
    if key is not None and not (key.isascii() and key.isprintable()):
        # Errors of http.client would show it.
        raise ConfigurationError("key: only printable ASCII characters can be sent")
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _refusal(server: str, status: int) -> ConfigurationError | BackendUnavailable:
    """Returns the error of an answer that is none of metrics."""
    if status in {401, 403}:
        return ConfigurationError(
            f"{server}: /metrics needs another key (--api-key or KVCONNECT_API_KEY): the metrics "
            "key or the admin key of a server that has one, else its API key"
        )
    if status == 404:
        return ConfigurationError(f"{server}: has no /metrics")
    return BackendUnavailable(f"{server}: answers with status {status}")


def _events(answer: HTTPResponse) -> Iterator[bytes]:
    while line := answer.readline(_LONGEST_TEXT):
        text = line.strip().removeprefix(b"data: ")
        if text == b"[DONE]":
            return
        if text:
            yield text
    raise BackendUnavailable("the server's answer ended too early")


def _object(text: bytes | str) -> dict[str, Any]:
    """Returns the JSON object `text`.

    Raises:
        HTTPException: it is none.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise HTTPException("does not answer as a server of kvconnect")
    return found


def _number(content: Mapping[str, Any], name: str) -> int:
    """Returns a whole number, or true or false, of an answer.

    Raises:
        HTTPException: it has none of that name.
    """
    value = content.get(name)
    if not isinstance(value, int):
        raise HTTPException(f"does not answer as a server of kvconnect: no '{name}'")
    return value


def _error(server: str, status: int, text: bytes) -> KvConnectError:
    """Returns the error that `server` answered with, or that `text` is none of kvconnect's."""
    try:
        error = _object(text).get("error")
    except HTTPException:
        error = None
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(error, dict) or not isinstance(message, str):
        if 300 <= status < 500:
            return ConfigurationError(
                f"{server}: answers with status {status}, and not as a server of kvconnect; give "
                "the URL of 'kvconnect serve', as http://host:8000"
            )
        return BackendUnavailable(f"{server}: answers with status {status}")
    if error.get("code") == "bad_file":
        return BadFrame(f"{server}: {message}")
    ours = str(error.get("type")) in _OURS
    return (ConfigurationError if ours else BackendUnavailable)(f"{server}: {message}")
