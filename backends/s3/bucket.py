"""The requests that the S3 store makes, each blocking, for threads."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from botocore.awsrequest import AWSPreparedRequest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from kvconnect.backends.s3.client import make_client
from kvconnect.backends.s3.errors import S3Failure, failures, failures_at_open
from kvconnect.backends.s3.quick import QuickRequests
from kvconnect.backends.s3.reply import Reply
from kvconnect.backends.s3.settings import S3Settings
from kvconnect.backends.s3.upload import Upload
from kvconnect.errors import BackendUnavailable

__all__ = ["Conflict", "Fetched", "Gone", "Listed", "S3Bucket"]

# boto3 tries again what fails before the body; this is for bodies that break off.
_BODY_ATTEMPTS = 3
_BODY_ERRORS = (
    ConnectionClosedError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)
_HEADERS = {
    "IfMatch": "If-Match",
    "IfNoneMatch": "If-None-Match",
    "StorageClass": "x-amz-storage-class",
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
}
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Gone(Exception):
    """The object that was to be read is not there."""


class Conflict(Exception):
    """The object that was to be written is there already, or is not what it was."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The beginning of an object.

    Attributes:
        data: its first bytes.
        etag: of the object; another one once it is written anew.
        nbytes: of the whole object.
        age_s: since it was written, by the server's clock alone.
    """

    data: bytes
    etag: str
    nbytes: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as a listing shows it."""

    name: str
    nbytes: int
    modified_at: float


class S3Bucket:
    """One bucket of a service, through boto3. Thread-safe; every method blocks.

    Args:
        settings: where it is.

    Attributes:
        quick: requests without boto3's machinery, after `check`; ``None``: it must do all of them.

    Raises:
        ConfigurationError: the profile, region or certificates are not there.
    """

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._bucket = settings.bucket
        self._writing = {
            name: value
            for name, value in (
                ("StorageClass", settings.storage_class),
                ("ServerSideEncryption", settings.sse),
                ("SSEKMSKeyId", settings.sse_kms_key_id),
            )
            if value
        }
        self._has_conditions = True
        self.quick: QuickRequests | None = None
        with failures_at_open(settings):
            client = make_client(settings)
        self._client, self._credentials = client.boto3, client.credentials
        self.transport = client.transport

    def close(self) -> None:
        """End requests in flight with an error, and close all connections."""
        if self.transport is not None:
            self.transport.abort()
        self._client.close()

    def end_overdue(self) -> None:
        """End requests that take far longer than their size explains."""
        if self.transport is not None:
            self.transport.end_overdue()

    def check(self) -> None:
        """See that the bucket is there and may be read.

        Raises:
            ConfigurationError: no such bucket, no credentials, or they are refused.
            BackendUnavailable: nobody answers, or with an error of its own.
        """
        name = self._settings.name("k", "absent")
        with failures_at_open(self._settings):
            # Not HEAD for the bucket: an answer to HEAD has no body that says what is wrong.
            sent = self._watched(name)
        if self.transport is not None and self._credentials is not None and sent is not None:
            self.quick = QuickRequests.like(
                sent.url,
                _text(sent.headers.get("Authorization", "")),
                name,
                self._credentials,
                self._client.meta.config,
                self.transport,
            )

    def _watched(self, name: str) -> AWSPreparedRequest | None:
        """Ask for an object that is not there; the request as boto3 made it in the end."""
        sent: list[AWSPreparedRequest] = []
        events = self._client.meta.events

        def watch(request: AWSPreparedRequest, **_: object) -> None:
            # The transport leaves it as it is; another bucket region makes boto3 ask again.
            sent.append(request)

        events.register_first("before-send.s3.GetObject", watch)
        try:
            self._client.get_object(Bucket=self._bucket, Key=name)["Body"].close()
        except ClientError as error:
            if not S3Failure.of(error).absent:
                raise
        finally:
            events.unregister("before-send.s3.GetObject", watch)
        return sent[-1] if sent else None

    def fetch(self, name: str, limit: int) -> Fetched | None:
        """The first `limit` bytes of an object, or all it has; ``None``: there is no such object.

        Raises:
            BackendUnavailable: it is not known whether there is.
        """
        for attempt in range(_BODY_ATTEMPTS):
            with failures(self._settings, "reading"):
                try:
                    return self._fetch(name, limit)
                except ClientError as error:
                    if S3Failure.of(error).status == 416:  # an empty object has no first byte
                        return self._fetch_empty(name)
                    raise
                except _BODY_ERRORS:
                    if attempt + 1 == _BODY_ATTEMPTS:
                        raise
        raise self._broken(name)

    def _fetch(self, name: str, limit: int) -> Fetched | None:
        reply = self._get(name, 0, limit)
        if reply is None:
            return None
        with closing(reply.body) as body:
            first, last, total = self._span(reply)
            if first != 0 or last >= limit:
                raise self._wrong_range(reply)
            data = body.read(last + 1)
        if len(data) != last + 1:
            raise IncompleteReadError(actual_bytes=len(data), expected_bytes=last + 1)
        return Fetched(data, reply.headers["etag"], total, _age(reply.headers))

    def _get(self, name: str, start: int, end: int) -> Reply | None:
        """Bytes ``start..end`` of an object; ``None``: it is not there."""
        span = f"bytes={start}-{end - 1}"
        quick = None if self.quick is None else self.quick.get(name, span)
        if quick is not None:
            return None if quick.status == 404 else quick
        try:
            response = self._client.get_object(Bucket=self._bucket, Key=name, Range=span)
        except ClientError as error:
            if S3Failure.of(error).absent:
                return None
            raise
        meta = response["ResponseMetadata"]
        return Reply(meta["HTTPStatusCode"], meta["HTTPHeaders"], response["Body"])

    def _fetch_empty(self, name: str) -> Fetched | None:
        try:
            response = self._client.head_object(Bucket=self._bucket, Key=name)
        except ClientError as error:
            if S3Failure.of(error).status == 404:  # without a body that tells more
                return None
            raise
        headers = response["ResponseMetadata"]["HTTPHeaders"]
        return Fetched(b"", response["ETag"], response["ContentLength"], _age(headers))

    def read(
        self, name: str, start: int, views: Sequence[memoryview], etag: str | None = None
    ) -> None:
        """Fill `views`, one after the other, with the bytes of an object from `start` on.

        Args:
            name: of the object.
            start: of the bytes.
            views: where they go.
            etag: of the object that is meant; ``None``: whatever has the name.

        Raises:
            Gone: there is no such object, it is another one now, or it ends before `start`.
            BackendUnavailable: `views` are undefined.
        """
        for attempt in range(_BODY_ATTEMPTS):
            with failures(self._settings, "reading"):
                try:
                    self._read(name, start, views, etag)
                    return
                except ClientError as error:
                    if S3Failure.of(error).status == 416:
                        raise Gone(name) from error
                    raise
                except _BODY_ERRORS:
                    if attempt + 1 == _BODY_ATTEMPTS:
                        raise

    def _read(self, name: str, start: int, views: Sequence[memoryview], etag: str | None) -> None:
        end = start + sum(view.nbytes for view in views)
        reply = self._get(name, start, end)
        if reply is None:
            raise Gone(name)
        with closing(reply.body):
            first, last, total = self._span(reply)
            if etag is not None and _opaque(reply.headers["etag"]) != _opaque(etag):
                raise Gone(f"{name} was replaced")
            if first == start and last + 1 < end and last + 1 == total:
                raise Gone(f"{name} has {total} bytes")
            if first != start or last + 1 != end:
                raise self._wrong_range(reply)
            filled = reply.fill(views)
        if filled != end - start:
            raise IncompleteReadError(actual_bytes=filled, expected_bytes=end - start)

    def put(
        self, name: str, views: Sequence[memoryview | bytes], *, replaces: str | None = ""
    ) -> str:
        """Write an object of all `views`, whole or not at all; return its etag.

        Args:
            name: of the object.
            views: its bytes.
            replaces: etag of the object that is there; empty: none is there; ``None``: whatever is.

        Raises:
            Conflict: something else is there.
            BackendUnavailable: it may have been written, or not.
        """
        condition = {}
        if replaces is not None and self._has_conditions:
            condition = {"IfMatch": replaces} if replaces else {"IfNoneMatch": "*"}
        options = {**condition, **self._writing}
        with failures(self._settings, "writing"):
            try:
                return self._put(name, Upload(views), options)
            except ClientError as error:
                failure = S3Failure.of(error)
                # 409: another writer of this object was faster, or it was deleted meanwhile.
                absent = bool(replaces) and failure.absent
                if failure.conflict or failure.status == 409 or absent:
                    raise Conflict(name) from error
                if not condition or failure.status != 501:
                    raise
        # A service without conditional writes: the last writer wins, of equal content.
        self._has_conditions = False
        return self.put(name, views, replaces=None)

    def _put(self, name: str, body: Upload, options: Mapping[str, str]) -> str:
        headers = {_HEADERS[option]: value for option, value in options.items()}
        etag = None if self.quick is None else self.quick.put(name, body, headers)
        if etag == "":
            raise Conflict(name)
        if etag is None:
            body.seek(0)
            response = self._client.put_object(Bucket=self._bucket, Key=name, Body=body, **options)
            written = response["ResponseMetadata"]["HTTPStatusCode"] == 200
            etag = response.get("ETag") if written else None
        if not etag:
            raise BackendUnavailable(f"{self._settings}: writing {name}: no receipt")
        return str(etag)

    def remove(self, name: str) -> None:
        """Delete an object; none is no error."""
        with failures(self._settings, "deleting"):
            self._client.delete_object(Bucket=self._bucket, Key=name)

    def pages(self, prefix: str) -> Iterator[list[Listed]]:
        """All objects whose name begins with `prefix`, up to 1,000 at a time."""
        pages = iter(
            self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=prefix
            )
        )
        while True:
            with failures(self._settings, "listing"):
                page = next(pages, None)
            if page is None:
                return
            yield [
                Listed(found["Key"], int(found["Size"]), found["LastModified"].timestamp())
                for found in page.get("Contents", ())
            ]

    def _span(self, reply: Reply) -> tuple[int, int, int]:
        """First and last byte of a reply, and length of the whole object."""
        match = _CONTENT_RANGE.fullmatch(reply.headers.get("content-range", ""))
        if reply.status != 206 or match is None or "etag" not in reply.headers:
            raise self._wrong_range(reply)
        first, last, total = map(int, match.groups())
        length = str(last - first + 1)
        # Without a length the body ends where it ends: in chunks, or with its connection.
        if reply.headers.get("content-length", length) != length:
            raise self._wrong_range(reply)
        encoding = reply.headers.get("content-encoding", "identity")
        if encoding not in {"", "identity", "aws-chunked"}:
            raise BackendUnavailable(
                f"{self._settings}: the service answered with content-encoding '{encoding}', "
                "which was not asked for"
            )
        return first, last, total

    def _wrong_range(self, reply: Reply) -> BackendUnavailable:
        found = reply.headers.get("content-range", "none")
        return BackendUnavailable(
            f"{self._settings}: asked for a range, the service answered {reply.status} with range "
            f"'{found}' of {reply.headers.get('content-length')} bytes"
        )

    def _broken(self, name: str) -> BackendUnavailable:
        return BackendUnavailable(f"{self._settings}: reading {name}: its body breaks off")


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _opaque(etag: str) -> str:
    # Some services quote it in one answer only.
    return etag.removeprefix("W/").strip('"')


def _age(headers: Mapping[str, str]) -> float:
    modified, now = _when(headers.get("last-modified")), _when(headers.get("date"))
    return 0.0 if modified is None else max(0.0, (now or time.time()) - modified)


def _when(text: str | None) -> float | None:
    try:
        return None if text is None else parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None
